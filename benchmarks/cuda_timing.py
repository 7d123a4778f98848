"""Sessions over torch's GPU memory, and times read from the device's own clock; shared by the CUDA benchmarks."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence

import onnx
import onnxruntime as ort
import torch

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION

ONNX_TYPES = {torch.bfloat16: 16, torch.float16: 10, torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.uint8: 2}
L2_BYTES = 64 << 20  # rotated buffers hold more than this, so that a run does not read the last one's leftovers


class DeviceSession:
    """A session whose inputs and outputs are torch tensors that stay where they are, on the GPU or the host.

    Runs on torch's current stream, which must not be the default one (`use_own_stream`). With `graph` the nodes are
    captured at the first run and replayed after it.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        graph: bool = False,
    ) -> None:
        self._kept = [*inputs.values(), *outputs.values()]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        ortolan.custom_ops.register(options)
        stream = torch.cuda.current_stream().cuda_stream
        if not stream:
            raise RuntimeError("ONNX Runtime would make a stream of its own, which torch's events do not time")
        provider = {"user_compute_stream": str(stream), "enable_cuda_graph": str(int(graph))}
        model = _model(nodes, inputs, outputs).SerializeToString()
        self._session = ort.InferenceSession(model, options, providers=[("CUDAExecutionProvider", provider)])
        self._binding = self._session.io_binding()
        for bind, tensors in ((self._binding.bind_input, inputs), (self._binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(name, tensor.device.type, 0, ONNX_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._options.add_run_config_entry("gpu_graph_id", "1" if graph else "-1")

    def __call__(self) -> None:
        """Enqueue one run."""
        self._session.run_with_iobinding(self._binding, self._options)


def _model(
    nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> onnx.ModelProto:
    def infos(tensors: Mapping[str, torch.Tensor]) -> list[onnx.ValueInfoProto]:
        make = onnx.helper.make_tensor_value_info
        return [make(name, ONNX_TYPES[t.dtype], list(t.shape)) for name, t in tensors.items()]

    graph = onnx.helper.make_graph(list(nodes), "benchmark", infos(inputs), infos(outputs))
    domains = {"": 23, OPERATOR_DOMAIN: OPERATOR_VERSION, "com.microsoft": 1}
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def use_own_stream() -> None:
    """Move torch's work off the default stream: its address is 0, which ONNX Runtime takes for none given."""
    torch.cuda.set_stream(torch.cuda.Stream())


def begin(figures: str) -> tuple[dict[str, object], float]:
    """Seed torch, move its work off the default stream, and print the machine and what the figures are.

    Returns:
        The machine's description, and the bytes that a copy moves per second.
    """
    torch.manual_seed(0)
    use_own_stream()
    where = machine()
    copy, matmul = (float(str(where[name])) for name in ("copy_bytes_per_second", "matmul_flops"))
    print(f"{where['gpu']}, onnxruntime {where['onnxruntime']}, torch {where['torch']}, CUDA {where['cuda']}")
    print(f"copy {copy / 1e12:.2f} TB/s, matmul {matmul / 1e12:.0f} TFLOP/s; {figures}")
    return where, copy


def median_ms(step: Callable[[], object], calls: int = 1, repeats: int = 15) -> float:
    """Return the median device time of one of the `calls` that a step makes, in milliseconds."""
    return medians_by_turns({"": (step, calls)}, repeats)[""]


def medians_by_turns(steps: Mapping[str, tuple[Callable[[], object], int]], repeats: int = 15) -> dict[str, float]:
    """Return the median of each of several steps as `median_ms` does; they take turns.

    Clocks fall under the power limit while a GPU is busy: who comes first would gain by it.
    """
    for step, _ in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, (step, calls) in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """Capture a function into a CUDA graph, on the current stream: a `DeviceSession` runs on no other."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


def copy_bytes_per_second() -> float:
    """Measure a large device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source)))


def copy_ms(moved_bytes: int) -> float:
    """Time a device-to-device copy that reads and writes `moved_bytes` in all, as one of a graph's many."""
    count = 1 + min(40, 3 * L2_BYTES // max(moved_bytes, 1))
    pairs = [torch.empty(2, max(moved_bytes // 2, 1), device="cuda", dtype=torch.uint8) for _ in range(count)]

    def step() -> None:
        for source, target in pairs:
            target.copy_(source)

    return median_ms(captured(step), count)


def matmul_flops() -> float:
    """Measure an 8192^3 bfloat16 product on random data, operations per second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * 8192**3 / (1e-3 * median_ms(lambda: a @ b))


def machine() -> dict[str, object]:
    """Describe where the figures come from."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "onnxruntime": ort.__version__,
        "ortolan": ortolan.custom_ops.library_info().version,
        "copy_bytes_per_second": copy_bytes_per_second(),
        "matmul_flops": matmul_flops(),
    }
