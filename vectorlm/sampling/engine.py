"""The inference engine of a training loop: all ranks call it, and `update` swaps in the trained weights."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data import encoding
from vectorlm.data.prompts import as_list
from vectorlm.errors import ChangedBySleep, EngineError, EngineTimeout
from vectorlm.ranks.collectives import Collectives
from vectorlm.ranks.engine_ranks import EngineRanks, capture, comparable, require_equal
from vectorlm.ranks.process_end import require_own_process
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import arguments, messages
from vectorlm.sampling.contract import WeightSource
from vectorlm.sampling.handle import BatchHandle, LocalRequests, exchange_results
from vectorlm.sampling.hot_swap import HotSwap, warn_of_restored
from vectorlm.sampling.inline_channel import InlineChannel
from vectorlm.sampling.process_channel import ProcessChannel, let_go_of_last_error
from vectorlm.sampling.sampler.scheduler import require_room_for_sleep
from vectorlm.sampling.settings import Channels, EngineSettings
from vectorlm.types import POLICY, Completion, InFlight, Prompt, SamplingRequest, UpdateReport

if TYPE_CHECKING:
    import torch
    import vllm

    from vectorlm.sampling.weights.shared_base import SharedBase


WAIT_S = 0.05
"""Longest wait of a rank for its own engine between two exchanges with the other ranks, in seconds."""
_STARTED: weakref.WeakSet[SamplingEngine] = weakref.WeakSet()
"""The engines of this process that have a sampler process."""


class SamplingEngine:
    """An inference engine on the training devices, vLLM by default; all ranks call it.

    Rank 0 starts the engine in a separate process (on several nodes the first rank of each does). On CPU the
    constructor returns immediately and the first call waits; on CUDA the constructor waits, because the engine measures
    the free memory. Every method is a collective: all ranks call it, in the same order and with the same arguments
    (except the prompts of the sharded methods), and get the same result. Without a launcher it is an ordinary object:

    >>> with SamplingEngine("path/to/model", dtype="float32") as engine:  # doctest: +SKIP
    ...     engine.update(model, train_step=10)
    ...     print(engine.generate_text(["2 + 2 ="]))

    Args:
        model: A Hugging Face model folder.
        settings: The engine's settings. Each field is also a keyword, as in ``timeout_s=60``.
        topology: This rank's place in the run; read from the environment when omitted.
        data_parallel_size: Number of engines per node, a divisor of the node's ranks. Engines share the node's devices,
            take prompts from a common queue and swap weights together. When omitted, 1 on CPU; on CUDA all devices
            sample.
        devices: Devices of the node that only its engines use: CUDA devices as the ranks count them, cores on CPU.
            The ranks' own devices when omitted.
        channel: `process`: the engine samples in a separate process, while the ranks do something else. `inline`: it
            samples in the process of the rank that owns it, inside the calls that ask for results (not with vLLM).
        log_path: A file for the sampler process's output.
        **engine_args: Fields of `settings`; vLLM's ``EngineArgs`` (``dtype``, ``max_model_len``,
            ``tensor_parallel_size`` …), or arguments of another `inference`; ``fp32_head=True`` computes logits in
            float32. ``chat_template="file.jinja"`` and ``chat_template_kwargs={…}`` set how chats are rendered.

    Raises:
        FileNotFoundError: `model` looks like a path and does not exist.
        TypeError: An argument is unknown.
        ValueError: An argument is out of range, or the folder has two sets of weights.
    """

    def __init__(
        self,
        model: str | Path,
        settings: EngineSettings | None = None,
        *,
        topology: Topology | None = None,
        data_parallel_size: int | None = None,
        devices: Sequence[int] | None = None,
        channel: Channels = "process",
        log_path: str | Path | None = None,
        **engine_args: Any,
    ) -> None:
        let_go_of_last_error()
        if data_parallel_size is not None:
            engine_args["data_parallel_size"] = data_parallel_size
        settings = arguments.merge(settings or EngineSettings(), engine_args, SamplingEngine.__init__)
        arguments.require_channel(channel, devices=devices, log_path=log_path)
        arguments.require_folder(model, settings.inference)
        self._topology = topology = Topology.from_environment() if topology is None else topology
        engine_args = dict(settings.engine_args)
        self._tokenizer_of = arguments.tokenizer_of(model, engine_args)
        if settings.inference == "vllm" and engine_args.get("data_parallel_size") is None and devices is None:
            engine_args |= arguments.parallel_sizes(engine_args, topology, model)
        elif settings.inference == "server":
            engine_args = arguments.with_deadlines(engine_args, settings)
        data_parallel_size = engine_args.pop("data_parallel_size", None) or 1
        devices = arguments.share_of_engine(
            devices, data_parallel_size, engine_args, topology, settings.inference
        )
        self._model = str(model)
        self._settings = settings
        self._collectives = Collectives(topology, settings.timeout_s)
        self.engine_ranks = EngineRanks(topology, self._collectives, data_parallel_size)
        """The ranks that own an engine, and their exchanges with the other ranks."""
        self._ready: messages.Ready | None = None
        self._final_error: EngineError | None = None
        """The error that every call raises: the engine could not be built, or a sleep has changed it."""
        self._closed = False
        self._names = itertools.count()
        self._pid = os.getpid()
        self._open: weakref.WeakValueDictionary[str, BatchHandle] = weakref.WeakValueDictionary()
        """The batches of `submit` that are still referenced, by name."""
        own_args = engine_args
        if settings.inference == "vllm" and (index := topology.rank // self.engine_ranks.ranks_per_engine):
            # Engines with one seed would draw the same random numbers for requests without a seed.
            own_args = {**engine_args, "seed": (engine_args.get("seed") or 0) + index}
        start = messages.Start(str(model), own_args, settings.receiver, settings.inference)
        self._channel = self._open_channel(start, channel, devices, log_path)
        self.local = None if self._channel is None else LocalRequests(self._channel, settings.timeout_s)
        """Single requests to the engine that this rank owns; None on ranks without an engine."""
        # Nothing here may refer to the engine: it must end as soon as a notebook cell drops it.
        self._swap = HotSwap(self.engine_ranks, self._channel, settings)
        same = arguments.same_on_ranks(settings, engine_args)
        self._same = comparable({**same, "data_parallel_size": data_parallel_size, "channel": channel})
        if isinstance(self._channel, ProcessChannel):
            if other := next((engine for engine in _STARTED if not engine._closed), None):
                warnings.warn(
                    f"another engine of this process is open, with {other._model}: both hold weights and a KV cache. "
                    "If you no longer need it, call its close() first. A notebook also keeps the output of its "
                    "cells: `%reset out` drops it.",
                    stacklevel=2,
                )
            _STARTED.add(self)
        if topology.is_cuda:
            self.wait_until_ready()

    def _open_channel(
        self, start: messages.Start, channel: str, devices: Sequence[int] | None, log_path: str | Path | None
    ) -> Any:
        """Return this rank's `messages.Channel` to its engine; None where another rank owns it."""
        if not self.engine_ranks.owns_an_engine:
            return None
        if channel == "inline":
            return InlineChannel(start, while_waiting=self._collectives.show_life)
        log = None if log_path is None else Path(log_path)
        if log is not None and not self._topology.is_main:
            # Engines that share a folder must not write into one file.
            log = log.with_suffix(f".{self._topology.rank}{log.suffix}")
        return ProcessChannel(
            start,
            self._topology,
            ranks_per_engine=self.engine_ranks.ranks_per_engine,
            devices=devices,
            log_path=log,
            while_waiting=self._collectives.show_life,
        )

    @property
    def version(self) -> int:
        """The training step of the policy's weights; -1 for the checkpoint that the engine was started from.

        After an interrupted `update` it is the step before. The engine may already sample with the new weights, which
        `Completion.versions` shows.
        """
        return self._swap.version

    @property
    def adapters(self) -> dict[str, int]:
        """The names that `sample` takes as `adapter`, with the training step of each one's weights.

        Without LoRA layers it is `policy` alone. `base` is the model without an adapter. Its step is that of the last
        update that sent the base's weights: usually the first update, because later ones send only adapters. It is -1
        while the engine has the base of its folder, as always with `share_base` and with a base in 4 bits.
        """
        return dict(self._swap.adapters)

    @property
    def sampling_params(self) -> Any:
        """Sampling parameters for calls without their own."""
        return self._settings.sampling_params

    @property
    def receiver(self) -> str:
        """Storage of the weights, `live` (in place) or `packed`; waits until the engine is loaded."""
        return self.wait_until_ready().receiver

    @property
    def runner(self) -> str:
        """vLLM's version and model runner, as in ``vLLM 0.32.0, model runner V1 (CPUModelRunner)``; else empty."""
        return self.wait_until_ready().runner

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer for texts and chat messages: the backend's, the one in ``tokenizer=…``, or the folder's."""
        tokenizer = self.wait_until_ready().tokenizer
        if tokenizer is None:
            name, options = self._tokenizer_of
            tokenizer = encoding.load_tokenizer(name, **options)
        chat = self._settings.chat
        return encoding.with_template(tokenizer, chat.chat_template, chat.chat_template_kwargs)

    def wait_until_ready(self) -> messages.Ready:
        """Wait until the engine has loaded; every other call does so by itself.

        Raises:
            EngineError: The engine is closed, could not be built (the text says why), or died.
        """
        require_own_process(self._pid)
        if self._final_error is not None:
            # Without this, each notebook cell that raises it adds its frames.
            raise self._final_error.with_traceback(None)
        self._collectives.require_open()
        if self._ready is None:
            require_equal(self._collectives.all_gather_object("start the engine", self._same))
            try:
                self._ready = self.engine_ranks.on_engine_ranks(
                    "load the engine",
                    lambda: self._channel.answer(0, self._settings.start_timeout_s, "loading the model"),
                )[0]
            except EngineError as error:
                # The sampler sends it once, but every later call must raise it. A silent engine may answer later.
                if not isinstance(error, EngineTimeout):
                    self._final_error = error
                    _STARTED.discard(self)
                    if self._channel is not None:
                        self._channel.close()  # It would keep the memory of its imports.
                raise
            self._swap.keeps_base = self._ready.keeps_base
            if self._ready.runner and self._topology.is_main:
                print(f"the engine is ready: {self._ready.runner}", file=sys.stderr, flush=True)
        return self._ready

    def sample(
        self, prompts: Sequence[Prompt] | str, sampling_params: Any = None, adapter: str = POLICY
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of the prompts.

        Args:
            prompts: Text, chat messages or token ids; the same on every rank.
            sampling_params: A mapping, ``vllm.SamplingParams``, or one of these per prompt; the engine's own when
                omitted. Log-probabilities are reported if it asks for them (``logprobs=0``: the sampled token's).
            adapter: Name of the adapter to sample with, as in its `update`; `base` is the model without an adapter.

        Raises:
            UnknownAdapter: The engine has no such adapter; the text lists those that it has.
            RankMismatch: A rank passed other prompts or parameters than rank 0.
            EngineError: The engine raised (the text holds its traceback), died, or fell silent.
            HandoffTimeout: A rank did not make this call within the deadline.
        """
        return self._submit("sample", [(prompts, sampling_params)], adapter=adapter)[0].complete()

    def sample_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any = None
    ) -> list[list[Completion]]:
        """Return the completions of this rank's prompts; the engine samples the prompts of all ranks as one batch.

        Args:
            local_prompts: This rank's prompts; may be empty.
            sampling_params: As for `sample`, for this rank's prompts; may differ between ranks.

        Raises the errors of `sample`, on all ranks.
        """
        return self._submit_sharded(local_prompts, sampling_params).complete()

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        sampling_params: Any = None,
        use_tqdm: bool = False,
        adapter: str = POLICY,
    ) -> list[vllm.RequestOutput]:
        """Do what ``vllm.LLM.generate`` does, on every rank; arguments and errors are the same as for `sample`.

        Args:
            use_tqdm: Print on rank 0 how long it took; there is no progress bar.

        Returns:
            vLLM's own objects, equal on all ranks. They cost a vLLM import in each rank; `sample` does not.
        """
        start = time.perf_counter()
        prompts = as_list(prompts)
        (batch,) = self._submit("generate", [(prompts, sampling_params)], True, adapter)
        outputs = _with_texts(batch.complete(), prompts)
        if use_tqdm and self._topology.is_main:
            print(f"generated in {time.perf_counter() - start:.1f} s", flush=True)
        return outputs

    def generate_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any = None
    ) -> list[vllm.RequestOutput]:
        """Do what `sample_sharded` does, and return vLLM's own objects."""
        prompts = list(local_prompts)
        outputs = self._submit_sharded(prompts, sampling_params, as_request_outputs=True).complete()
        return _with_texts(outputs, prompts)

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text; raises as `sample` does."""
        return [completions[0].text for completions in self.sample(prompts, sampling_params)]

    def generate_text_only(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Do what `generate_text` does, under the name that VectorLM has for it; deprecated."""
        warnings.warn("generate_text_only is now generate_text.", DeprecationWarning, stacklevel=2)
        return self.generate_text(prompts, sampling_params)

    def submit(
        self, prompts: Sequence[Prompt] | str, sampling_params: Any = None, adapter: str = POLICY
    ) -> BatchHandle:
        """Start sampling and return immediately; the engine samples while the ranks do something else.

        Takes the arguments of `sample`, and returns the batch: `done()`, `result(timeout_s)` and `cancel()`. Keep it on
        every rank: a batch that one rank drops is cancelled, with a warning. An `update` during the batch needs
        `in_flight`.

        Raises:
            RankMismatch, HandoffTimeout: As for `sample`. Errors of the engine are raised by `result`.
        """
        return self.submit_many([(prompts, sampling_params)], adapter)[0]

    def submit_many(self, requests: Sequence[SamplingRequest], adapter: str = POLICY) -> list[BatchHandle]:
        """Do what `submit` does for several pairs of prompts and sampling parameters, in one exchange between ranks."""
        batches = self._submit("submit", requests, adapter=adapter)
        self._open.update((batch.name, batch) for batch in batches)
        return batches

    def poll(self, timeout_s: float = 0.0) -> list[BatchHandle]:
        """Return the batches that have finished, each once, in the order of their submission, with their results.

        Batches that were cancelled, read or dropped are left out.

        Args:
            timeout_s: If none has finished, wait for one, this many seconds at most; does not wait if nothing is in
                flight.
        """
        self.wait_until_ready()
        deadline_s = time.monotonic() + timeout_s
        kept = {name: batch for name, batch in self._open.items() if not batch.is_settled}

        def finished_here() -> dict[str, bool]:
            return {name: batch.is_finished_here() for name, batch in kept.items()}

        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0) if kept else 0.0
            of_ranks = self._look(
                "poll",
                lambda: (finished_here(), deadline_s <= time.monotonic()),
                lambda: any(finished_here().values()),
                left_s,
            )
            # A batch that one rank has garbage-collected has no collective result any more.
            for name in [name for name in kept if any(name not in flags for flags, _ in of_ranks)]:
                warnings.warn(
                    "another rank dropped a batch of submit(), so it is cancelled on all ranks.",
                    RuntimeWarning,
                    2,
                )
                kept.pop(name).cancel()
            finished = [batch for name, batch in kept.items() if all(flags[name] for flags, _ in of_ranks)]
            # Clocks differ between ranks, so the clock of rank 0 decides.
            if finished or not kept or of_ranks[0][1]:
                break
        exchange_results(finished)
        for batch in finished:
            self._open.pop(batch.name, None)
        return finished

    def update(
        self,
        model: torch.nn.Module | WeightSource,
        train_step: int,
        in_flight: InFlight = "refuse",
        name: str = POLICY,
    ) -> UpdateReport:
        """Hot-swap the weights of `model` into the running engine, unless it holds them under `train_step` already.

        Every rank sends its own shard (`transport`), and no rank returns before the engine has all weights. Later
        requests find no cached blocks of the old weights. Supports plain modules, FSDP2, tied weights and LoRA
        (`lora_mode`).

        Args:
            model: The trained model, on every rank, or a `vectorlm.sampling.contract.WeightSource`.
            train_step: The version of its weights, at least 0; it may be below the last one.
            in_flight: Treatment of requests in flight. `refuse`: the update raises. `keep`: they continue with a KV
                cache of both weights. `recompute`: they continue after their KV cache is recomputed with the new
                weights. `drain`: the update waits until they end.
            name: The adapter to replace or add; the engine keeps its other adapters. Any name but `policy` needs an
                engine with LoRA layers (``enable_lora=True``) and a free slot of its ``max_loras``. All adapters share
                one base: the base weights of the last update that sent them. A model whose adapters are off or missing
                is the base and takes no slot.

        Raises:
            WeightMismatch: Trainer and engine do not hold the same model; no weight has changed.
            ConfigError: The engine's `lora_mode` cannot express the model's LoRA options, or `transport` is impossible.
            TypeError, ValueError: An argument has the wrong type, or is out of range.
            ChecksumMismatch: The engine does not hold what was sent; it samples nothing until an update succeeds.
            RankMismatch: Ranks passed different steps.
            EngineError, HandoffTimeout: As for `sample`.
        """
        arguments.require_update(model, train_step, in_flight)
        arguments.require_adapter(name, self._settings.lora_mode)
        ready = self.wait_until_ready()
        with nullcontext() if self.local is None else self.local.held():
            while in_flight == "drain" and not self._is_drained():
                pass
            with self._refusing_changes():
                return self._swap.update(
                    model, train_step, in_flight, ready.transports, self._num_in_flight, name
                )

    def remove_adapter(self, name: str) -> None:
        """Free the slot of an adapter after its last request; new ones are refused once its batches have ended.

        Raises:
            UnknownAdapter: The engine has no such adapter.
            EngineError: `name` is `policy` or `base`.
        """
        self.wait_until_ready()
        self.engine_ranks.check_same_args("remove an adapter", name, repr(name))
        command = messages.RemoveAdapter(name)
        # Several engines draw the prompts of a batch one after the other, and would refuse those not drawn yet.
        while name != POLICY and not self._is_drained(name):
            pass
        # The requests may end one after the other on several engines.
        busy = self.engine_ranks.ranks
        while busy:
            removed = self.engine_ranks.on_engine_ranks(
                "remove an adapter", lambda: self._channel.call(command, self._settings.timeout_s), busy
            )
            busy = tuple(rank for rank, is_gone in zip(busy, removed, strict=True) if not is_gone)
            if busy:
                self._look("remove an adapter", lambda: None, lambda: False, WAIT_S)
        self._swap.remove(name)

    def share_base(self, model: torch.nn.Module) -> SharedBase:
        """Make the frozen weights of a PEFT model views of this engine's parameters: one base in memory.

        Call it before the model is sharded and its optimizer is made, and pass `parameters` of the result to
        ``fully_shard`` as ``ignored_params``. Ranks may pass a model without memory (on the meta device) if another
        rank has the weights. Later updates of this model send its adapters alone. The engine must hold the weights of
        the model already, from the same folder and in the same dtype.

        When the engine ends, every later forward pass of the model raises `EngineDied`.

        Returns:
            The parameters that are views, and the numbers of bytes that are in memory once and twice.

        Raises:
            ConfigError: The engine has no LoRA layers, or the model is sharded.
            WeightMismatch, ChecksumMismatch: The engine holds other weights; the model is as before.
            HandleRefused: This rank cannot read the engine's weights in place; the model is as before.
        """
        self.wait_until_ready()
        return self._swap.share(model)

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed before the model verifies them (``speculative_config``)."""
        args = self._settings.engine_args
        return self._settings.inference == "vllm" and args.get("speculative_config") is not None

    def accepted_tokens(self) -> float | None:
        """Return the mean number of proposed tokens that were accepted per step of a sequence, since the last call.

        None if nothing was sampled, or nothing is proposed. Collective.
        """
        self.wait_until_ready()
        if not self.speculates:
            return None
        command = messages.TakeAccepted()
        counts = self.engine_ranks.on_engine_ranks(
            "count accepted tokens", lambda: self._channel.call(command, self._settings.timeout_s)
        )
        accepted, steps = map(sum, zip(*counts, strict=True))
        return accepted / steps if steps else None

    def next_name(self) -> str:
        """Return a new name, unique in this engine and equal on all ranks."""
        return str(next(self._names))

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Free the device memory of weights or KV cache; until `wake_up` the engine samples nothing.

        No rank returns before the memory is free. Sleeping weights are lost until the next `update`, and the prefix
        cache is emptied. On CUDA the engine must have been built with ``enable_sleep_mode=True``; on CPU the memory
        stays where it is, under the same rules. ``kv_cache=False`` needs vLLM 0.29 on CUDA.

        Before the weights sleep, vLLM's workers list the tensors that neither vLLM nor an update would bring back.

        Raises:
            EngineError: Requests are running, or the engine was built without sleep mode; nothing sleeps then.
        """
        self.wait_until_ready()
        require_room_for_sleep(self._num_in_flight())
        if weights:
            self._swap.require_own_weights()
            self._swap.forget()  # Before the call: it may fail half way.
        self._rest(messages.Sleep(weights, kv_cache), "put the engine to sleep")

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Take back the memory that `sleep` freed; weights that slept are lost until the next `update`.

        No memory is taken before every rank has called. `update` wakes the weights, so this order needs the least
        memory: sleep, train, update, wake the KV cache, sample.

        When the weights wake, listed tensors that the sleep changed are restored, with a warning on rank 0. Once per
        engine, log-probabilities of a fixed text are compared with those before the sleep. That happens at the first
        update after a sleep if it brings the same weights, or when the last sleeping part wakes.

        Raises:
            ChangedBySleep: A tensor is lost, or log-probabilities differ. Every later call raises this, until you build
                the engine again. `update` raises it too.
            EngineError: The device has too little free memory; the part sleeps on, and the call may be repeated.
        """
        with self._refusing_changes():
            woken = self._rest(messages.WakeUp(weights, kv_cache), "wake the engine up")
        warn_of_restored(woken, self._topology, stacklevel=3)

    def close(self) -> None:
        """End the engine; safe to call twice, and not a collective."""
        if self._pid != os.getpid():
            return  # This is a fork; the engine belongs to the parent.
        self._closed = True
        self._swap.close()
        if self._channel is not None:
            self._channel.close()
        self._collectives.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SamplingEngine cannot be sent to another process: build it in the process that uses it."
        )

    def __repr__(self) -> str:
        pid = f", sampler process {self._channel.pid}" if isinstance(self._channel, ProcessChannel) else ""
        state = "closed" if self._closed else f"version {self.version}{pid}"
        return f"<SamplingEngine of {self._model!r} with {self._settings.inference}: {state}>"

    def __enter__(self) -> SamplingEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A notebook cell that runs again drops the old engine without a call of close().
        try:  # noqa: SIM105 (`contextlib.suppress` may be gone already when the interpreter ends)
            self.close()
        except Exception:
            pass

    def _submit(
        self,
        place: str,
        requests: Sequence[SamplingRequest],
        as_request_outputs: bool = False,
        adapter: str = POLICY,
    ) -> list[BatchHandle]:
        """Queue prompts that are the same on every rank, a batch for each request."""
        pairs = [
            (as_list(prompts), self.sampling_params if params is None else params)
            for prompts, params in requests
        ]
        for prompts, params in pairs:
            arguments.one_each(params, len(prompts))
        self.wait_until_ready()
        encoded, error = capture(
            lambda: [(self._encode(prompts), arguments.copy_params(params)) for prompts, params in pairs]
        )
        asked = [prompt for prompts, _ in pairs for prompt in prompts]
        first = f", the first {str(asked[0])[:60]!r}" if asked else ""
        self.engine_ranks.check_same_args(
            place, (encoded, repr(error), adapter), f"{len(asked)} prompts{first}"
        )
        if error is not None:
            raise error
        commands = [
            messages.Generate(ids, params, as_request_outputs, adapter=adapter) for ids, params in encoded
        ]
        return [self._begin(command) for command in commands]

    def _submit_sharded(
        self, local_prompts: Sequence[Prompt], params: Any, as_request_outputs: bool = False
    ) -> BatchHandle:
        """Queue one batch of all ranks' prompts; its result holds this rank's."""
        self.wait_until_ready()

        def encode() -> tuple[list[list[int]], list[Any]]:
            token_ids = self._encode(as_list(local_prompts))
            own_params = arguments.copy_params(self.sampling_params if params is None else params)
            return token_ids, arguments.one_each(own_params, len(token_ids))

        shards = self.engine_ranks.on_all_ranks("sample sharded", encode)
        first = sum(len(token_ids) for token_ids, _ in shards[: self._topology.rank])
        prompts = [prompt for token_ids, _ in shards for prompt in token_ids]
        all_params = [row for _, row_params in shards for row in row_params]
        command = messages.Generate(prompts, all_params, as_request_outputs)
        return self._begin(command, range(first, first + len(shards[self._topology.rank][0])))

    def _look(
        self, place: str, look: Callable[[], Any], until: Callable[[], bool], wait_s: float
    ) -> list[Any]:
        """Wait for this rank's engine, until `until()` holds or `wait_s` is over; return `look()` of every rank."""
        if self._channel is not None:
            self._channel.advance(until, min(wait_s, WAIT_S))
        return self.engine_ranks.on_all_ranks(place, look)

    def _num_in_flight(self) -> int:
        """Return the number of batches and single requests in flight on all engines; 0 for one engine.

        An engine counts only its own requests: of several engines, one could refuse a call that another accepts.
        A single engine refuses by itself.
        """
        if len(self.engine_ranks.ranks) == 1:
            return 0

        def count_here() -> int:
            waiting = 0 if self.local is None else self.local.num_in_flight
            return waiting + sum(not batch.is_finished_here() for batch in self._open.values())

        return sum(self.engine_ranks.on_all_ranks("count the requests in flight", count_here))

    def _is_drained(self, adapter: str | None = None) -> bool:
        """Wait a moment; return whether no request is in flight on any rank, or no batch of this adapter."""

        def ended() -> bool:
            is_idle = adapter is not None or self.local is None or not self.local.num_in_flight
            batches = (batch for batch in self._open.values() if adapter in (None, batch.adapter))
            return is_idle and all(batch.look() for batch in batches)

        def look() -> bool:
            if self.local is not None:
                self.local.advance()
            return ended()

        return all(self._look("drain", look, lambda: capture(ended) != (False, None), WAIT_S))

    @contextmanager
    def _refusing_changes(self) -> Iterator[None]:
        """Let every later call raise the error of a sleep that changed the engine, on all ranks and for all engines."""
        try:
            yield
        except ChangedBySleep as error:
            self._final_error = error
            raise

    def _rest(self, command: messages.Sleep | messages.WakeUp, place: str) -> list[Any]:
        self.wait_until_ready()
        self.engine_ranks.check_same_args(place, command, str(command))
        return self.engine_ranks.on_engine_ranks(
            place, lambda: self._channel.call(command, self._settings.timeout_s)
        )

    def _encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return encoding.encode_all(prompts, lambda: self.tokenizer)

    def _begin(self, command: messages.Generate, places: range | None = None) -> BatchHandle:
        ready = self.wait_until_ready()
        if ready.warning and self.version < 0 and self._topology.is_main:
            warnings.warn(ready.warning, stacklevel=4)
        return BatchHandle(
            self.next_name(),
            command,
            places=range(len(command.prompts)) if places is None else places,
            engine_ranks=self.engine_ranks,
            channel=self._channel,
            max_num_seqs=ready.max_num_seqs,
            silence_s=self._settings.timeout_s,
        )


def _with_texts(outputs: list[vllm.RequestOutput], prompts: Sequence[Prompt]) -> list[vllm.RequestOutput]:
    """Set the prompts that were texts on vLLM's objects, as vLLM does; its engine got token ids only."""
    for output, prompt in zip(outputs, prompts, strict=True):
        if isinstance(prompt, str):
            output.prompt = prompt
    return outputs
