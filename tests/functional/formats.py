"""Flags of tiny runs by the kind of their checkpoints."""

_OF_FSDP = ["--untie-embeddings-and-output-weights", "--no-gradient-accumulation-fusion"]
_MUON = "--optimizer muon --use-distributed-optimizer".split()

FORMATS = {
    "torch_dist": _MUON,
    "torch": "--optimizer muon --ckpt-format torch --tensor-model-parallel-size 2".split(),
    "fsdp_dtensor": [*_MUON, "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", *_OF_FSDP],
}
