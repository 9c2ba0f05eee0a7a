from torchvision.transforms.v2.functional import pil_to_tensor

__all__ = ["pil_to_tensor"]
