ImageReadMode = decode_image = None  # imported by name, never called for images that are open already
