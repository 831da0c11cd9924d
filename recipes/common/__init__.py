"""What the recipes share: options, data, models, run state and the comparison of stock and patched models."""

from . import missing as missing
