"""Write weights to safetensors files of bounded size (shards), with an index.

huggingface_hub needs the whole state dict in memory; here only one shard is.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diffmegatron.errors import UserError


class ShardWriter:
    """Writer of weights in the order of the :meth:`add` calls into an existing directory.

    A shard has at most ``max_shard_bytes`` bytes of weights; a larger weight is a shard alone.
    """

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Convert a weight to ``dtype``, and add the copy to the current or the next shard."""
        size = tensor.numel() * dtype.itemsize
        held = sum(weight.nbytes for weight in self._pending.values())
        if self._pending and held + size > self._max_shard_bytes:
            self._flush()
        # A view would keep its whole base tensor in memory, and safetensors refuses views.
        self._pending[name] = tensor.detach().to(
            "cpu", dtype, copy=True, memory_format=torch.contiguous_format
        )
        self._total_bytes += size

    def close(self) -> None:
        """Write the last shard, rename the files for ``transformers``, and index several shards."""
        self._flush()
        if len(self._shards) == 1:
            self._path(1).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            shard = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            self._path(number).rename(self._directory / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        path = self._path(len(self._shards))
        try:
            path.touch()
            mode = path.stat().st_mode
            # Older versions of transformers require the framework in the metadata.
            save_file(self._pending, path, metadata={"format": "pt"})
            # safetensors makes the file readable only by its owner, so restore the umask's mode.
            path.chmod(mode)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {path}: {error}") from error
        self._pending.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"shard-{number:05d}.safetensors"
