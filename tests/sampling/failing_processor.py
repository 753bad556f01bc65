"""A logits processor for vLLM that fails in every step after the warm-up."""

from vllm.v1.sample.logits_processor import LogitsProcessor


class FailsAfterWarmUp(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        self.num_steps = 0

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        self.num_steps += 1
        if self.num_steps > 1:
            raise RuntimeError("this step fails")
        return logits
