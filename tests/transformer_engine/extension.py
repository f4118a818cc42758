"""A stand-in for ``transformer_engine_torch``, the compiled extension of Transformer Engine.

The functions that the layers call in fp32, bf16 and FP8 are written in plain torch. Any other
function raises NotImplementedError when it is called. Any other class has a number for each
attribute.
"""

import enum
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Names and numbers of the dtypes in the extension's enum ``DType``. Recent versions of
# transformer_engine/pytorch/constants.py check that the enum has exactly these names.
DTYPES = {
    "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
    "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
}  # fmt: skip
WIDE = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


class Unsupported(ModuleType):
    """A module in which every name exists; its functions raise an error when they are called.

    A name with a capital first letter is a class, any other name is a function.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Numbers(name, (), {}) if name[0].isupper() else self._raising(name)
        setattr(self, name, value)
        return value

    def _raising(self, name: str) -> object:
        def call(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in on a CPU")

        return call


class _Numbers(type):
    """Metaclass of classes that have every attribute; each attribute is a different number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


def build() -> Unsupported:
    """Return a module that replaces the extension."""
    module = Unsupported("transformer_engine_torch")
    module.DType = enum.IntEnum("DType", DTYPES)
    backends = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    module.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", backends)
    # Versions before 2.18 use this name. Later versions check the list of members, which does not
    # contain it, so the name is an attribute and not a member.
    module.NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0
    for passes, tensors in {
        "FP8FwdTensors": "GEMM{0}_INPUT GEMM{0}_WEIGHT GEMM{0}_OUTPUT",
        "FP8BwdTensors": "GRAD_OUTPUT{0} GRAD_INPUT{0}",
    }.items():
        names = [each for number in (1, 2, 3) for each in tensors.format(number).split()]
        setattr(module, passes, enum.IntEnum(passes, {each: i for i, each in enumerate(names)}))
    for function in (generic_gemm, rmsnorm_fwd, rmsnorm_bwd, bgrad_quantize):
        setattr(module, function.__name__, function)
    # cpp_extensions re-exports the names that dir(module) lists when it is imported, so these two
    # names must exist before.
    for name in ("layernorm_fwd", "layernorm_bwd"):
        getattr(module, name)
    module.get_cudnn_version = lambda: 91200
    module.get_cublasLt_version = lambda: 120600
    module.get_num_cublas_streams = lambda: 4
    return module


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: object,
    out_dtype: int | None,
    bias: Tensor | None,
    bias_dtype: object,
    gelu: bool,
    gelu_in: object,
    grad: bool,
    workspace: object,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: object = None,
    comm_type: object = None,
    extra_output: object = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Return the matrix product op(b) op(a).

    The order is that of cuBLAS, which multiplies column-major matrices.

    Args:
        a: [k, n], or [n, k] if ``transpose_a``; leading dimensions are flattened.
        b: [..., k], or [k, m] if ``transpose_b``; leading dimensions are flattened.
        out: tensor to write the product to; if ``accumulate``, the product is added to it.
        out_dtype: dtype of the product, a number of ``DTYPES``.
        bias: [n], added to the product. If ``grad``, the bias is [m] instead; it is not added, and
            its gradient is computed.

    Returns:
        The product ([..., n], or [m, n] if ``transpose_b``), the gradient of the bias [m] in the
        dtype of the bias (None without ``grad`` or bias), and None for two unsupported outputs.
    """
    assert quantizer is None and not gelu and comm_overlap is None and extra_output is None
    assert alpha == 1.0 and (beta is None or beta == float(accumulate))
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    assert left.dtype == right.dtype, f"{left.dtype} times {right.dtype}"
    assert a.is_contiguous() and b.is_contiguous()
    product = (left.T if transpose_b else left) @ (right.T if transpose_a else right)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = left.sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if out_dtype is not None:
        product = product.to(WIDE[int(out_dtype)])
    if not transpose_b:
        product = product.view(*b.shape[:-1], -1)
    if out is None:
        return product, bias_gradient, None, None
    if accumulate:
        out += product.view_as(out)
    else:
        out.copy_(product.view_as(out))
    return out, bias_gradient, None, None


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: None,
    quantizer: None,
    dtype: int,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return RMSNorm of x [n, hidden] in x's dtype, None, and 1 / rms [n] in float32."""
    assert out is None and quantizer is None and WIDE[int(dtype)] == x.dtype
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    normed = x.float() * scale[:, None] * (weight.float() + zero_centered)
    return normed.to(x.dtype), None, scale


def rmsnorm_bwd(
    gradient: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [n, hidden] and of the weight [hidden], each in its dtype."""
    normed = x.float() * scale[:, None]
    weighted = gradient.float() * (weight.float() + zero_centered)
    along = (weighted * normed).mean(-1, keepdim=True)
    of_x = scale[:, None] * (weighted - along * normed)
    of_weight = (gradient.float() * normed).sum(0)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the gradient of a bias [n], from that of the output [m, n], and the latter in FP8."""
    return gradient.sum(0), quantizer(gradient)


class _Cuda:
    """``torch.cuda`` with a device that seems available."""

    is_available = staticmethod(lambda: True)
    device = staticmethod(lambda _: nullcontext())
    nvtx = SimpleNamespace(range=lambda _: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchWithCuda:
    """``torch`` for modules that require CUDA: a device seems available, ``empty`` uses the CPU."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: object = None, **keywords: Any) -> Tensor:
        """Return ``torch.empty`` on the CPU."""
        return torch.empty(*size, **keywords)


def accept_cpu_tensors() -> None:
    """Replace the checks of Transformer Engine's modules that require a GPU."""
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base, layernorm_linear, linear

    # Versions before 2.10 define the function in base.
    for module in (gemm, base):
        module.get_cublas_workspace_size_bytes = lambda: 1
    for module in (base, layernorm_linear, linear):
        module.torch = TorchWithCuda()
    torch.cuda.is_current_stream_capturing = lambda: False
    prepare_forward = base.TransformerEngineBaseModule.prepare_forward

    def prepare(*arguments: Any, **keywords: Any) -> Any:
        with _cuda_tensors():
            prepared = prepare_forward(*arguments, **keywords)
        # Versions before 2.14 return a context manager, which checks the input when it is entered.
        return prepared if isinstance(prepared, Tensor) else _entered_with_cuda_tensors(prepared)

    base.TransformerEngineBaseModule.prepare_forward = prepare


@contextmanager
def _cuda_tensors() -> Iterator[None]:
    """Make every tensor seem to be on CUDA within a ``with`` block.

    The block should contain little code, because torch itself also reads ``is_cuda``.
    """
    torch.Tensor.is_cuda = True
    try:
        yield
    finally:
        del torch.Tensor.is_cuda


@contextmanager
def _entered_with_cuda_tensors(manager: AbstractContextManager[Tensor]) -> Iterator[Tensor]:
    with ExitStack() as stack:
        with _cuda_tensors():
            entered = stack.enter_context(manager)
        yield entered
