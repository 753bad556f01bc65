"""The tokens that a grammar allows at each place of a completion."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

from vectorlm.errors import RolloutError
from vectorlm.train.packing import Rows

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""The supported fields of ``vllm.StructuredOutputsParams``."""


class Grammar:
    """The grammar of completions, compiled with xgrammar as in vLLM."""

    def __init__(
        self,
        structured_outputs: Mapping[str, Any],
        tokenizer: Any,
        vocab_size: int,
        end_tokens: Collection[int],
    ) -> None:
        """Take one of `KINDS` and its value.

        `end_tokens` are allowed where the text may end, and end it. `vocab_size` is the number of logits with padding.
        """
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        compiler = xgrammar.GrammarCompiler(info)
        ((kind, value),) = structured_outputs.items()
        if kind.startswith("json"):
            schema = {"type": "object"} if kind == "json_object" else value
            compiled = compiler.compile_json_schema(schema if isinstance(schema, str) else json.dumps(schema))
        elif kind == "regex":
            compiled = compiler.compile_regex(value)
        else:
            # A JSON string is also a valid EBNF string.
            texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
            compiled = compiler.compile_grammar(
                value if kind == "grammar" else f"root ::= {' | '.join(texts)}"
            )
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_tokens) or None)
        self._vocab_size = vocab_size

    def bitmasks(self, rows: Rows) -> torch.Tensor:
        """Return int32 [M, ceil(V / 32)] on the CPU: for each requested token, one bit per allowed token.

        Raises:
            RolloutError: The completion holds a token that the grammar does not allow.
        """
        import xgrammar

        assert rows.turn_starts is not None
        found = xgrammar.allocate_token_bitmask(int(rows.is_asked.sum()), self._vocab_size)
        matcher, place = self._matcher, 0
        for row in torch.nonzero(rows.is_asked.any(dim=1))[:, 0].tolist():
            lists = (x[row].tolist() for x in (rows.input_ids, rows.is_asked, rows.turn_starts))
            for at, (token, is_asked, start) in enumerate(zip(*lists, strict=True)):
                if at == start:
                    matcher.reset()
                # After an end token that is ignored (`ignore_eos`), vLLM allows every token.
                is_free = matcher.is_terminated()
                if is_asked:
                    if not is_free:
                        matcher.fill_next_token_bitmask(found, place)
                    place += 1
                if start >= 0 and not is_free and not matcher.accept_token(token):
                    raise RolloutError(
                        f"token {at - start} of a completion is {token}, which the grammar of rl.sampling_params."
                        "structured_outputs does not allow there. Train on completions sampled with it."
                    )
        return found
