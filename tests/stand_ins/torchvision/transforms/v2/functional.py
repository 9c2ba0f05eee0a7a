import numpy as np
import torch
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode


def pil_to_tensor(image):
    """uint8 [C, H, W]."""
    return torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def resize(image, size, interpolation=InterpolationMode.BILINEAR, antialias=True):
    """image: uint8 or float [..., C, H, W]; size: (height, width)."""
    flat = image.reshape(-1, *image.shape[-3:])
    found = interpolate(flat.float(), tuple(size), mode=interpolation.value, align_corners=False, antialias=antialias)
    found = found.round().clamp(0, 255).to(torch.uint8) if image.dtype == torch.uint8 else found.to(image.dtype)
    return found.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std, inplace=False):
    mean, std = (torch.as_tensor(values, dtype=image.dtype, device=image.device)[:, None, None] for values in (mean, std))
    return (image - mean) / std
