"""Opens graphs with ONNX Runtime on the device of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ortolan.custom_ops import register
from ortolan.custom_ops.library import onnxruntime_problem
from ortolan.errors import CapacityError, ContractMismatchError, OpLibraryError
from ortolan.runtime.device import forks
from ortolan.runtime.device.buffers import HostBuffers
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.device.providers import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    ERRORS,
    check_device_number,
    cuda_options,
    device_number,
    preload_cuda_libraries,
    quiet_opening,
    resolve_device,
)

Session = Any  # onnxruntime.InferenceSession
NO_WEIGHTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a model runs.

    Attributes:
        provider: of ONNX Runtime.
        num_threads: of ONNX Runtime's intra-op pool; 0 takes one per core.
        cuda: the CUDA device; None: the host.
    """

    provider: str
    num_threads: int = 0
    cuda: CudaBuffers | None = None

    @property
    def buffers(self) -> HostBuffers | CudaBuffers:
        """Where arrays live."""
        return self.cuda or HostBuffers()

    @property
    def name(self) -> str:
        """The device's name."""
        return f"cuda:{self.cuda.device_id}" if self.cuda else "cpu"

    def open(
        self,
        model: str | bytes,
        folder: Path,
        *,
        captures: bool = False,
        weights: Mapping[str, Any] = NO_WEIGHTS,
    ) -> Session:
        """Open a graph.

        Args:
            model: its path, or its bytes.
            folder: of the model, for messages.
            captures: whether runs may be captured as CUDA graphs.
            weights: OrtValues that take the place of weights in the model's files, by name; they must outlive the
                session.

        Raises:
            CapacityError: the device has no memory for the weights.
            ContractMismatchError: ONNX Runtime refuses the graph.
            OpLibraryError: the provider cannot be started.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS
        options.intra_op_num_threads = self.num_threads
        if isinstance(model, bytes):  # what it names as external data lies in the folder
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        providers: list[Any] = [self.provider]
        if self.cuda:
            options.enable_mem_pattern = False  # patterns of every prompt length would each keep their memory
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
            settings = cuda_options(self.cuda.device_id, self.cuda.stream_pointer, graph=captures)
            providers = [(self.provider, settings), CPU_PROVIDER]
        register(options)
        for name, value in weights.items():
            options.add_initializer(name, value)
        try:
            fallback = int(self.provider != CPU_PROVIDER)  # from the CPU it would only print, to standard output
            with quiet_opening(self.cuda.device_id if self.cuda else 0):
                session = onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=fallback)
        except Exception as error:  # the binding raises its own exception types, one per status code
            if self.cuda and is_out_of_memory(error):
                raise CapacityError(f"{self.name} has no memory for {folder}: {error}") from error
            raise ContractMismatchError(f"ONNX Runtime cannot open the graph of {folder}: {error}") from error
        if session.get_providers()[0] != self.provider:
            raise OpLibraryError(
                f"ONNX Runtime cannot start {self.provider}: it offers {session.get_providers()} instead; check that "
                "the CUDA and cuDNN libraries of onnxruntime-gpu can be loaded"
            )
        forks.outlive_forks(session)
        _check_texts(session, model if isinstance(model, str) else str(folder))
        return session


def find_device(name: str | None, num_threads: int) -> Device:
    """Return the device that a name stands for; None takes CUDA where it is usable, else the CPU.

    Raises:
        ConfigError, DeviceError: as `resolve_device`; or there is no CUDA device of that number.
        OpLibraryError: onnxruntime is missing, or broken.
    """
    try:
        provider = resolve_device(name)
    except ModuleNotFoundError as error:
        raise OpLibraryError(onnxruntime_problem() or str(error)) from error
    if provider != CUDA_PROVIDER:
        return Device(provider=provider, num_threads=num_threads)
    number = device_number(name)
    check_device_number(number)
    preload_cuda_libraries()
    return Device(provider=provider, num_threads=num_threads, cuda=CudaBuffers(number))


def _check_texts(session: Session, name: str) -> None:
    """Raise ContractMismatchError where names or metadata of a graph are not texts."""
    try:
        values = (*session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs())
        _ = [(value.name, value.shape) for value in values]
        _ = session.get_modelmeta().custom_metadata_map
    except UnicodeDecodeError as error:
        raise ContractMismatchError(
            f"{name} has names or metadata that are not UTF-8; export the model again"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Say whether ONNX Runtime failed for want of device memory."""
    text = str(error).lower()
    return any(sign in text for sign in ("failed to allocate memory", "out of memory", "available memory of"))
