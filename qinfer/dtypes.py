"""Number formats by the names that people and config.json give them."""

import torch

# what activations may be, as `dtype` names it
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
