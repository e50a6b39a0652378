"""Exact and dilated ring attention for Hugging Face Transformers.

Importing the package registers the attention implementation "ring_dilated", and its mask, with Transformers: at once where
Transformers has been imported, else when it is. The public names, in `__init__.pyi`, are loaded when they are first used, so
that patterns and plans need neither torch nor Transformers.
"""

import lazy_loader

from ._version import __version__ as __version__
from .hf.on_import import register_with_transformers
from .ring.callbacks import CALLBACKS

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_with_transformers()
CALLBACKS.update(
    count_rings=f"{__name__}.training.accelerator:count_rings",
    prepare_data_loader=f"{__name__}.training.loader:prepare_data_loader",
    load_pattern=f"{__name__}.evaluation.calibration.result:load_pattern",
)
