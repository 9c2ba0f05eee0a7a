"""What transformers' image and video processors need of torchvision, for machines where PyPI's wheel cannot be imported beside torch+cpu.

Tests put the folder above on PYTHONPATH. The three functions do what torchvision's do for the tensors that the processors hand them.
"""

__version__ = "0.28.0"
