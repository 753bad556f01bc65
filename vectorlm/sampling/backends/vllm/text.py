"""The text of completions, decoded once when they have ended; vLLM decodes every token when it is sampled."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

BEFORE_TOKENS = 8
"""Tokens of the prompt that are decoded before a completion: whether it begins with a space depends on them."""
HALF_A_CHARACTER = "\ufffd"


class Texts:
    """Decodes what vLLM was told not to decode, into the same text."""

    def __init__(self, tokenizer: Any) -> None:
        """Decode with vLLM's `tokenizer`; with None, or with one that is slow, vLLM's own text stays."""
        self._tokenizer = tokenizer
        self._params: dict[str, Any] = {}
        """By request; those that are not here have vLLM's own text, or none."""

    def take_over(self, name: str, params: Any) -> None:
        """Let vLLM sample the request without text, unless stop strings are looked for in it."""
        from transformers import PreTrainedTokenizerFast

        # As vLLM asks (0.26 to 0.32) before it decodes with the tokenizers library.
        is_fast = isinstance(self._tokenizer, PreTrainedTokenizerFast)
        if params.detokenize and not params.stop and is_fast:
            params.detokenize = False
            self._params[name] = params

    def fill(self, output: Any) -> None:
        """Write the texts into a finished ``RequestOutput``, and forget its request."""
        if (params := self._params.pop(output.request_id, None)) is not None:
            for each in output.outputs:
                # The token that ended it has no text.
                has_end = each.finish_reason == "stop" and not params.include_stop_str_in_output
                token_ids = list(each.token_ids)[:-1] if has_end else list(each.token_ids)
                each.text = self._decoded(output.prompt_token_ids, token_ids, params)

    def forget(self, names: Iterable[str]) -> None:
        """Drop requests that will not end."""
        for name in names:
            self._params.pop(name, None)

    def _decoded(self, prompt: list[int], token_ids: list[int], params: Any) -> str:
        backend, skips = self._tokenizer._tokenizer, params.skip_special_tokens
        if skips or params.spaces_between_special_tokens:
            before = prompt[-BEFORE_TOKENS:]
            prefix = backend.decode(before, skip_special_tokens=skips)
            whole = backend.decode([*before, *token_ids], skip_special_tokens=skips)
            if prefix and HALF_A_CHARACTER not in whole and whole.startswith(prefix):
                return str(whole[len(prefix) :])
        return self._decoded_in_steps(prompt, token_ids, params)

    def _decoded_in_steps(self, prompt: list[int], token_ids: list[int], params: Any) -> str:
        """Decode as vLLM does, which leaves out characters that never became whole."""
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

        request: Any = SimpleNamespace(request_id="", prompt_token_ids=prompt, sampling_params=params)
        steps = FastIncrementalDetokenizer(self._tokenizer, request)
        steps.update(token_ids, stop_terminated=False)
        return steps.get_next_output_text(finished=True, delta=False)
