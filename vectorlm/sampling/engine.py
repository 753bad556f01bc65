"""vLLM, usable from every rank of a training loop, with weights that follow the training."""

from __future__ import annotations

import hashlib
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from vectorlm.errors import EngineError, RankMismatch, VectorLMError
from vectorlm.ranks.meeting import Meeting
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import messages as say
from vectorlm.sampling.channel import Channel
from vectorlm.types import Completion, Prompt, UpdateReport

if TYPE_CHECKING:
    import torch
    import vllm

    from vectorlm.weights.publish import Publisher, Share

Result = TypeVar("Result")

RECEIVERS = ("auto", "live", "packed")


class SamplingEngine:
    """A vLLM engine on the training devices, called from all ranks alike.

    Rank 0 starts the engine in a process of its own; the constructor returns at once, so that the ranks load their
    model meanwhile, and the first call waits for it. Every method is a collective: all ranks call it, in the same
    order, with the same arguments, and get the same result. With one rank, or none, it is an ordinary object:

    >>> with SamplingEngine("path/to/model", dtype="float32") as engine:  # doctest: +SKIP
    ...     engine.update(model, train_step=10)
    ...     print(engine.generate_text(["2 + 2 ="]))

    Args:
        model: A Hugging Face model folder.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none: a mapping or ``vllm.SamplingParams``.
        receiver: How the engine holds weights on CPU. `live`: plain, the fastest to swap; `packed`: in oneDNN's
            layout, the faster to sample from; `auto` decides by the model's size. On CUDA there is only `live`.
        verify_updates: Prove after each update, by checksum, that the engine holds what the trainer sent.
        timeout_s: The longest silence, in seconds, that is tolerated from the engine or from a rank.
        start_timeout_s: The longest the engine may take to load, in seconds.
        log_path: A file for the sampler process's output.
        **engine_args: vLLM's own ``EngineArgs``: ``dtype``, ``max_model_len``, ``gpu_memory_utilization`` …

    Raises:
        FileNotFoundError: `model` looks like a path and does not exist.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        topology: Topology | None = None,
        sampling_params: Any = None,
        receiver: str = "auto",
        verify_updates: bool = True,
        timeout_s: float = 300.0,
        start_timeout_s: float = 1800.0,
        log_path: str | Path | None = None,
        **engine_args: Any,
    ) -> None:
        if receiver not in RECEIVERS:
            raise ValueError(f"receiver={receiver!r} is not known: it must be one of {', '.join(RECEIVERS)}.")
        if Path(model).is_absolute() and not Path(model).is_dir():
            raise FileNotFoundError(f"the model folder {model} does not exist.")
        self._topology = Topology.from_environment() if topology is None else topology
        if self._topology.local_world_size != self._topology.world_size:
            raise ValueError(
                f"the run has {self._topology.world_size} ranks and this node {self._topology.local_world_size}: the "
                "engine shares memory with its ranks, so all of them must be on one node."
            )
        if engine_args.get("tensor_parallel_size", 1) != 1:
            raise ValueError(
                f"tensor_parallel_size={engine_args['tensor_parallel_size']} cannot be swapped yet: it must be 1."
            )
        self._sampling_params = sampling_params
        self._verify_updates = verify_updates
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._meeting = Meeting(self._topology, timeout_s)
        self._version = -1
        self._held_step: int | None = None
        self._receiver: str | None = None
        self._publisher: Publisher | None = None
        self._closed = False
        self._channel: Channel | None = None
        if self._topology.is_main:
            start = say.Start(str(model), engine_args, receiver)
            self._channel = Channel(
                start,
                self._topology,
                log_path=Path(log_path) if log_path else None,
                while_waiting=self._meeting.show_life,
            )

    @property
    def version(self) -> int:
        """The training step whose weights the engine holds; -1 for the checkpoint that it was started from."""
        return self._version

    @property
    def receiver(self) -> str:
        """How the engine holds its weights, `live` or `packed`; waits until the engine is loaded."""
        self.wait_until_ready()
        assert self._receiver is not None
        return self._receiver

    def wait_until_ready(self) -> None:
        """Wait until the engine has loaded; every other call does so by itself.

        Raises:
            EngineError: The engine is closed, could not be built (the text says why), or died.
        """
        if self._closed:
            raise EngineError("the engine is closed.")
        if self._receiver is None:
            ready = self._on_main("wait for the engine to load", self._ready)
            self._receiver = ready.receiver

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of the prompts.

        Args:
            prompts: Text, chat messages or token ids; the same on every rank.
            sampling_params: A mapping, ``vllm.SamplingParams``, or one of these per prompt; the engine's own when
                omitted. Log-probabilities are reported if it asks for them (``logprobs=0``: the sampled token's).

        Raises:
            RankMismatch: A rank passed other prompts or parameters than rank 0.
            EngineError: The engine raised (the text holds its traceback), died, or fell silent.
            HandoffTimeout: A rank did not make this call within the deadline.
        """
        from vectorlm.sampling.packed import PackedCompletions

        if (payload := self._generate("sample", prompts, sampling_params, as_request_outputs=False)) is None:
            return []
        packed = pickle.loads(payload)
        assert isinstance(packed, PackedCompletions)
        return packed.unpack()

    def generate(
        self, prompts: Sequence[Prompt] | str, sampling_params: Any = None, use_tqdm: bool = False
    ) -> list[vllm.RequestOutput]:
        """Do what ``vllm.LLM.generate`` does, on every rank.

        Args:
            prompts: Text, chat messages or token ids; the same on every rank.
            sampling_params: As for `sample`.
            use_tqdm: Print on rank 0 how long it took; the engine is another process, so there is no bar.

        Returns:
            vLLM's own objects, equal on all ranks. They cost a vLLM import in each rank; `sample` does not.

        Raises:
            RankMismatch, EngineError, HandoffTimeout: As for `sample`.
        """
        start = time.perf_counter()
        payload = self._generate("generate", prompts, sampling_params, as_request_outputs=True)
        if use_tqdm and self._topology.is_main:
            print(f"generated in {time.perf_counter() - start:.1f} s", flush=True)
        return [] if payload is None else pickle.loads(payload)

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text; raises as `sample` does."""
        return [completions[0].text for completions in self.sample(prompts, sampling_params)]

    def update(self, model: torch.nn.Module, train_step: int) -> UpdateReport:
        """Hot-swap the weights of `model` into the running engine; nothing moves if it holds `train_step` already.

        Every rank writes its own shard into memory shared with the engine; nothing is gathered. The prefix cache is
        emptied. Works for plain modules, FSDP2 modules and tied embeddings.

        Args:
            model: The trained model, on every rank.
            train_step: The version that its weights are, at least 0.

        Raises:
            WeightMismatch: Trainer and engine do not hold the same model; no weight has changed.
            ValueError: `train_step` is negative.
            ChecksumMismatch: The engine does not hold what was sent; it generates nothing until an update succeeds.
            RankMismatch: Ranks passed different steps.
            EngineError, HandoffTimeout: As for `sample`.
        """
        if train_step < 0:
            raise ValueError(f"train_step={train_step} is not a version: it must be at least 0.")
        self.wait_until_ready()
        start = time.perf_counter()
        self._agree("update", train_step, f"train_step={train_step}")
        if train_step == self._held_step:
            return UpdateReport(train_step, True, 0, 0.0, 0.0, time.perf_counter() - start)
        publisher = self._connect(model)
        # Every rank finds out whether its part can be sent before any rank writes a byte.
        shares: list[Share] = []
        self._together("prepare the update", lambda: shares.extend(publisher.shares(model)))
        # From here until the engine has proven the new weights, nobody knows what it holds.
        self._held_step = None
        self._on_main("begin the update", lambda: self._call(say.BeginUpdate()))
        published_from = time.perf_counter()
        checksums = self._together("publish weights", lambda: publisher.write(shares, self._verify_updates))
        publish_s = time.perf_counter() - published_from
        totals = [sum(parts) % 2**64 for parts in zip(*checksums, strict=True)]
        finish = say.FinishUpdate(train_step, totals if self._verify_updates else None)
        updated = self._on_main("finish the update", lambda: self._call(finish))
        self._version = self._held_step = train_step
        total_s = time.perf_counter() - start
        return UpdateReport(train_step, False, publisher.num_bytes, publish_s, updated.load_s, total_s)

    def close(self) -> None:
        """End the engine; safe to call twice, and not a collective."""
        self._closed = True
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._channel is not None:
            self._channel.close()
        self._meeting.close()

    def __enter__(self) -> SamplingEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A notebook cell that is run again drops the old engine without closing it. Written out, because at the
        # end of the interpreter `contextlib.suppress` may be gone already.
        try:  # noqa: SIM105
            self.close()
        except Exception:
            pass

    def _generate(
        self,
        place: str,
        prompts: Sequence[Prompt] | str,
        sampling_params: Any,
        as_request_outputs: bool,
    ) -> bytes | None:
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._sampling_params if sampling_params is None else sampling_params
        self.wait_until_ready()
        self._agree(place, (prompts, params), _summary(prompts))
        if not prompts:
            return None
        command = say.Generate(prompts, params, as_request_outputs)
        return self._on_main(place, lambda: self._call(command).payload)

    def _call(self, command: Any) -> Any:
        assert self._channel is not None
        return self._channel.call(command, self._timeout_s)

    def _ready(self) -> say.Ready:
        assert self._channel is not None
        return self._channel.answer(0, self._start_timeout_s, "loading the model")

    def _connect(self, model: torch.nn.Module) -> Publisher:
        """Agree with the engine, once, on what will be sent and where it lies."""
        from vectorlm.weights.plan import manifest_of
        from vectorlm.weights.publish import Publisher

        if self._publisher is None:
            manifest = manifest_of(model)
            connected = self._on_main("connect the weights", lambda: self._call(say.Connect(manifest)))

            def attach() -> None:
                self._publisher = Publisher(connected.layout, self._topology)

            self._together("map the arena", attach)
        assert self._publisher is not None
        return self._publisher

    def _agree(self, place: str, arguments: Any, summary: str) -> None:
        """Check that every rank came with the same arguments, and name those that did not."""
        digest = hashlib.blake2b(repr(arguments).encode()).hexdigest()
        notes = self._meeting.gather(place, (digest, summary))
        odd = [rank for rank, note in enumerate(notes) if note[0] != notes[0][0]]
        if odd:
            others = "; ".join(f"rank {rank}: {notes[rank][1]}" for rank in odd)
            raise RankMismatch(
                f"{place} needs the same arguments on every rank, but rank {', '.join(map(str, odd))} differs from "
                f"rank 0. Rank 0: {notes[0][1]}; {others}."
            )

    def _on_main(self, place: str, work: Callable[[], Result]) -> Any:
        """Do `work` on rank 0, and give its result or its error to every rank."""
        outcome = _outcome(work) if self._topology.is_main else None
        return _unwrap(pickle.loads(self._meeting.share(place, pickle.dumps(outcome) if outcome else None)))

    def _together(self, place: str, work: Callable[[], Result]) -> list[Any]:
        """Do `work` on every rank, and give all results, or the first error, to every rank."""
        return [_unwrap(outcome) for outcome in self._meeting.gather(place, _outcome(work))]


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        if isinstance(error, VectorLMError):
            return None, error
        return None, EngineError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")


def _unwrap(outcome: tuple[Any, Exception | None]) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result


def _summary(prompts: Sequence[Prompt]) -> str:
    first = f", the first {str(prompts[0])[:60]!r}" if prompts else ""
    return f"{len(prompts)} prompts{first}"
