"""A plugin of Axolotl that patches the model which it has loaded, adapters included.

In the YAML of a training, with this folder on PYTHONPATH:

    plugins:
      - axolotl_plugin.ActCompressPlugin
    actcompress_preset: exact

Without `actcompress_preset` the model stays as it is. Leave Axolotl's own kernels off (`lora_mlp_kernel`,
`lora_qkv_kernel`, `lora_o_kernel`, Liger, cut cross entropy): a layer whose `forward` another library has exchanged is
not patched, and `patch_report` in the log says so.
"""

import tiny  # noqa: F401  it says that Axolotl is missing, so it comes first
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from hf_actcompress import patch_model, patch_report


class ActCompressArgs(BaseModel):
    """The key that the plugin adds to the YAML."""

    actcompress_preset: str | None = None


class ActCompressPlugin(BasePlugin):
    """Patches the model after the adapters were added, and before Axolotl makes its trainer."""

    def get_input_args(self) -> str:
        return f"{__name__}.ActCompressArgs"

    def post_model_load(self, cfg, model: nn.Module) -> None:
        if cfg.actcompress_preset:
            patch_model(model, cfg.actcompress_preset)
            patch_report(model).print()
