"""Training: GRPO on torch FSDP2, ranks in processes of their own. Only rank-side modules import torch."""
