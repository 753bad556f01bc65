"""vLLM, usable from every rank of a training loop, with weights that follow the training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vectorlm.errors import EngineError, EngineTimeout
from vectorlm.ranks.meeting import Meeting
from vectorlm.ranks.placement import devices_of_engine
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import messages as say
from vectorlm.sampling.arguments import (
    as_list,
    choose_lora_mode,
    one_each,
    require_devices,
    require_engines,
    require_folder,
    require_in_flight,
    require_model,
    require_receiver,
    require_step,
    summary,
)
from vectorlm.sampling.channel import Channel
from vectorlm.sampling.hosts import Hosts
from vectorlm.sampling.last_error import let_go_of_last_error
from vectorlm.sampling.submission import Submission
from vectorlm.sampling.swap import HotSwap
from vectorlm.types import Completion, InFlight, Prompt, UpdateReport

if TYPE_CHECKING:
    import torch
    import vllm

    from vectorlm.contracts import WeightSource

DRAIN_POLL_S = 0.005
"""How often an update that drains looks whether the requests under way have ended."""


class SamplingEngine:
    """A vLLM engine on the training devices, called from all ranks alike.

    Rank 0 starts the engine in a process of its own (on several nodes the first rank of each does); the constructor
    returns at once, so that the ranks load their model meanwhile, and the first call waits for it. Every method is a
    collective: all ranks call it, in the same order, with the same arguments (but for the prompts of the sharded
    ones), and get the same result. With one rank, or none, it is an ordinary object:

    >>> with SamplingEngine("path/to/model", dtype="float32") as engine:  # doctest: +SKIP
    ...     engine.update(model, train_step=10)
    ...     print(engine.generate_text(["2 + 2 ="]))

    Args:
        model: A Hugging Face model folder.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none: a mapping or ``vllm.SamplingParams``.
        inference: What samples: `vllm`; `transformers`; `server`, a vLLM server that runs already (``url=…``); or a
            class that keeps `vectorlm.contracts.Inference`, as ``module:Class`` or ``file.py:Class``.
        receiver: How the engine holds weights on CPU. `live`: plain, the fastest to swap; `packed`: in oneDNN's
            layout, the faster to sample from; `auto` decides by the model's size. On CUDA there is only `live`.
        lora_mode: What an update of a PEFT model swaps. `adapter`: the adapters alone, into vLLM's LoRA layers (needs
            ``enable_lora=True`` and a ``max_lora_rank``); `merged`: weights with the adapters merged into a copy;
            `auto` is `adapter` where the engine has LoRA layers, `merged` otherwise.
        verify_updates: Prove after each update, by checksum, that the engine holds what the trainer sent.
        data_parallel_size: Engines per node, each on its own part of the node's devices; it divides the node's
            ranks. They take prompts from a common queue and swap weights together.
        devices: Devices of the node that are its engines' alone: CUDA devices as the ranks count them, cores on CPU.
            The ranks' own devices when omitted.
        timeout_s: The longest silence, in seconds, that is tolerated from the engine or from a rank.
        start_timeout_s: The longest the engine may take to load, in seconds.
        log_path: A file for the sampler process's output.
        **engine_args: vLLM's own ``EngineArgs``: ``dtype``, ``max_model_len``, ``tensor_parallel_size`` …; arguments
            of another `inference`.

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
        inference: str = "vllm",
        receiver: str = "auto",
        lora_mode: str = "auto",
        verify_updates: bool = True,
        data_parallel_size: int = 1,
        devices: Sequence[int] | None = None,
        timeout_s: float = 300.0,
        start_timeout_s: float = 1800.0,
        log_path: str | Path | None = None,
        **engine_args: Any,
    ) -> None:
        let_go_of_last_error()
        require_receiver(receiver)
        lora_mode = choose_lora_mode(lora_mode, bool(engine_args.get("enable_lora")))
        require_folder(model)
        self._topology = Topology.from_environment() if topology is None else topology
        require_engines(data_parallel_size, self._topology)
        ranks_per_engine = self._topology.local_world_size // data_parallel_size
        own_devices = devices_of_engine(devices, data_parallel_size, self._topology)
        num_devices = ranks_per_engine if own_devices is None else len(own_devices)
        require_devices(engine_args.get("tensor_parallel_size", 1), num_devices, self._topology)
        self._sampling_params = sampling_params
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._meeting = Meeting(self._topology, timeout_s)
        self._hosts = Hosts(self._topology, self._meeting, data_parallel_size)
        self._ready: say.Ready | None = None
        self._start_error: EngineError | None = None
        self._closed = False
        self._names = itertools.count()
        self._open: list[Submission] = []
        self._channel: Channel | None = None
        if self._hosts.own_a_sampler:
            self._channel = Channel(
                say.Start(str(model), engine_args, receiver, inference),
                self._topology,
                ranks_per_engine=self._hosts.ranks_per_engine,
                devices=own_devices,
                log_path=self._log_path(log_path),
                while_waiting=self._meeting.show_life,
            )
        # Nothing here may point back to the engine: dropped by a notebook cell, it must end at once.
        self._swap = HotSwap(
            self._topology,
            self._hosts,
            self._channel,
            lora_mode=lora_mode,
            silence_s=timeout_s,
            verify=verify_updates,
        )

    @property
    def version(self) -> int:
        """The training step whose weights the engine holds; -1 for the checkpoint that it was started from."""
        return self._swap.version

    @property
    def receiver(self) -> str:
        """How the engine holds its weights, `live` or `packed`; waits until the engine is loaded."""
        return self.wait_until_ready().receiver

    def wait_until_ready(self) -> say.Ready:
        """Wait until the engine has loaded; every other call does so by itself.

        Returns:
            What the first engine says of itself.

        Raises:
            EngineError: The engine is closed, could not be built (the text says why), or died.
        """
        if self._closed:
            raise EngineError("the engine is closed.")
        if self._start_error is not None:
            raise self._start_error
        if self._ready is None:
            try:
                self._ready = self._hosts.each("wait for the engine to load", self._loaded)[0]
            except EngineTimeout:
                raise
            except EngineError as error:
                # It is told once by the sampler, and asked for by every call.
                self._start_error = error
                raise
        return self._ready

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
        batch = self._submit("sample", as_list(prompts), sampling_params)
        with batch.taken_back_on_error():
            return batch.result()

    def sample_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any = None
    ) -> list[list[Completion]]:
        """Return the completions of this rank's own prompts; the engine sees those of all ranks as one batch.

        Args:
            local_prompts: This rank's prompts: any number, none included.
            sampling_params: As for `sample`, for this rank's prompts; may differ between ranks.

        Raises:
            EngineError, HandoffTimeout: As for `sample`; all ranks raise.
        """
        batch, first, last = self._submit_sharded(local_prompts, sampling_params, as_request_outputs=False)
        with batch.taken_back_on_error():
            return batch.part(first, last)

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
        batch = self._submit("generate", as_list(prompts), sampling_params, as_request_outputs=True)
        with batch.taken_back_on_error():
            outputs = batch.request_outputs()
        if use_tqdm and self._topology.is_main:
            print(f"generated in {time.perf_counter() - start:.1f} s", flush=True)
        return outputs

    def generate_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any = None
    ) -> list[vllm.RequestOutput]:
        """Do what `sample_sharded` does, and return vLLM's own objects."""
        batch, first, last = self._submit_sharded(local_prompts, sampling_params, as_request_outputs=True)
        with batch.taken_back_on_error():
            return batch.request_outputs()[first:last]

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text; raises as `sample` does."""
        return [completions[0].text for completions in self.sample(prompts, sampling_params)]

    def submit(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Submission:
        """Start sampling and return at once; the engine works on while the ranks do something else.

        Args:
            prompts: As for `sample`.
            sampling_params: As for `sample`.

        Returns:
            The batch: `done()`, `result(timeout_s)` and `cancel()`. Until it is done, `update` must be told what
            becomes of it.

        Raises:
            RankMismatch, HandoffTimeout: As for `sample`. What the engine raises comes with the result.
        """
        batch = self._submit("submit", as_list(prompts), sampling_params)
        self._open = [each for each in self._open if not each.is_settled] + [batch]
        return batch

    def poll(self) -> list[Submission]:
        """Return the batches that have finished, in the order of their submission, each of them once.

        Those that were cancelled or asked for their result are not among them.
        """
        self.wait_until_ready()
        self._open = [each for each in self._open if not each.is_settled]
        flags = self._hosts.together("poll", lambda: [batch.is_finished_here() for batch in self._open])
        finished = [batch for batch, *here in zip(self._open, *flags, strict=True) if all(here)]
        self._open = [batch for batch in self._open if batch not in finished]
        return finished

    def update(
        self, model: torch.nn.Module | WeightSource, train_step: int, in_flight: InFlight = "refuse"
    ) -> UpdateReport:
        """Hot-swap the weights of `model` into the running engine; nothing moves if it holds `train_step` already.

        Every rank writes its own shard into memory shared with the engine; nothing is gathered. No request that begins
        afterwards finds blocks of the old weights in the prefix cache. Works for plain modules, FSDP2 modules and tied
        embeddings; of PEFT models with LoRA the adapters alone are swapped, or merged weights, as `lora_mode` says. The
        model is never modified.

        Args:
            model: The trained model, on every rank; or another trainer that keeps `vectorlm.contracts.WeightSource`.
            train_step: The version that its weights are, at least 0.
            in_flight: What becomes of requests under way, between two of the engine's steps. `refuse`: the update is
                refused. `keep`: they go on at once with the KV cache that they have, of both weights. `recompute`:
                their cache is computed anew with the new weights. `drain`: the update waits for their end.

        Raises:
            WeightMismatch: Trainer and engine do not hold the same model; no weight has changed.
            ConfigError: The model's LoRA options are beyond the engine's `lora_mode`.
            TypeError: `model` is neither of these, or `train_step` no integer.
            ValueError: `train_step` is out of range.
            ChecksumMismatch: The engine does not hold what was sent; it generates nothing until an update succeeds.
            RankMismatch: Ranks passed different steps.
            EngineError, HandoffTimeout: As for `sample`.
        """
        require_model(model)
        require_step(train_step)
        require_in_flight(in_flight)
        self.wait_until_ready()
        if in_flight == "drain":
            while not all(batch.done() for batch in self._open):
                time.sleep(DRAIN_POLL_S)
        return self._swap.update(model, train_step, in_flight)

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Give device memory back to the trainer; until `wake_up` the engine samples nothing.

        No rank returns before the memory is free. Weights that slept hold nothing until the next `update`, and the
        prefix cache is emptied. On CUDA the engine must have been built with ``enable_sleep_mode=True``; on CPU the
        memory stays where it is and the same rules hold.

        Args:
            weights: Let the weights sleep.
            kv_cache: Let the KV cache sleep.

        Raises:
            EngineError: Requests are running, or the engine was built without sleep mode; nothing sleeps then.
            RankMismatch, HandoffTimeout: As for `sample`.
        """
        self._rest(say.Sleep(weights, kv_cache))
        if weights:
            self._swap.forget()

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Take back what `sleep` gave away; weights that slept hold nothing until the next `update`.

        No memory is taken before every rank has called. `update` wakes the weights by itself, so that the order
        that needs the least memory is: sleep, train, update, wake the KV cache, sample.

        Raises:
            EngineError: The device has not that much memory free; what could not be woken sleeps on.
            RankMismatch, HandoffTimeout: As for `sample`.
        """
        self._rest(say.WakeUp(weights, kv_cache))

    def close(self) -> None:
        """End the engine; safe to call twice, and not a collective."""
        self._closed = True
        self._swap.close()
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

    def _submit(
        self, place: str, prompts: list[Prompt], sampling_params: Any, as_request_outputs: bool = False
    ) -> Submission:
        params = self._sampling_params if sampling_params is None else sampling_params
        self.wait_until_ready()
        self._hosts.agree(place, (prompts, params), summary(prompts))
        return self._begin(prompts, params, as_request_outputs)

    def _submit_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any, as_request_outputs: bool
    ) -> tuple[Submission, int, int]:
        """Make one batch of all ranks' prompts; return it with the place of this rank's own."""
        params = self._sampling_params if sampling_params is None else sampling_params
        self.wait_until_ready()

        def bring() -> tuple[list[Prompt], list[Any]]:
            prompts = as_list(local_prompts)
            return prompts, one_each(params, len(prompts))

        notes = self._hosts.together("sample sharded", bring)
        batch = self._begin(
            [prompt for theirs, _ in notes for prompt in theirs],
            [each for _, theirs in notes for each in theirs],
            as_request_outputs,
        )
        first = sum(len(theirs) for theirs, _ in notes[: self._topology.rank])
        return batch, first, first + len(notes[self._topology.rank][0])

    def _rest(self, command: say.Sleep | say.WakeUp) -> None:
        self.wait_until_ready()
        place = "put the engine to sleep" if isinstance(command, say.Sleep) else "wake the engine up"
        self._hosts.agree(place, command, str(command))
        self._hosts.each(place, lambda: self._call(command))

    def _begin(self, prompts: list[Prompt], params: Any, as_request_outputs: bool) -> Submission:
        return Submission(
            str(next(self._names)),
            prompts,
            params,
            as_request_outputs=as_request_outputs,
            hosts=self._hosts,
            meeting=self._meeting,
            channel=self._channel,
            capacity=self.wait_until_ready().max_num_seqs,
            silence_s=self._timeout_s,
        )

    def _call(self, command: Any) -> Any:
        assert self._channel is not None
        return self._channel.call(command, self._timeout_s)

    def _loaded(self) -> say.Ready:
        assert self._channel is not None
        return self._channel.answer(0, self._start_timeout_s, "loading the model")

    def _log_path(self, log_path: str | Path | None) -> Path | None:
        """Return this host's own log: engines that share a folder must not write into one file."""
        if log_path is None or self._topology.is_main:
            return Path(log_path) if log_path else None
        return Path(log_path).with_suffix(f".{self._topology.rank}{Path(log_path).suffix}")
