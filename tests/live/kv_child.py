"""One engine in this process, driven along a list of steps: `run`, called in the child process of a `Host`.

Steps: ``["ask", NAME, PROMPT, TOKENS]``; ``["begin", NAME, PROMPT, TOKENS, STEPS]`` starts a request and runs so many
engine steps; ``["sync", DELTA, KV]``; ``["write", DELTA]`` updates without a pause; ``["back", CHECKPOINT]`` loads
version 0 of run kv and empties the cache; ``["end", NAME]`` runs a request to its end. Each named step leaves a record.
"""

from __future__ import annotations

from typing import Any

from conformance.live import probe

TOP = 4


class Child:
    """The engine and the records."""

    def __init__(self, job: dict[str, Any]) -> None:
        probe.prepare_process()
        from vllm import LLM, SamplingParams

        backend = {"weight_transfer_config": {"backend": job["backend"]}} if job["backend"] else {}
        self.llm = LLM(
            model=job["checkpoint"],
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=8,
            seed=0,
            disable_log_stats=True,
            kv_cache_memory_bytes=256 << 20,
            **backend,
        )
        self.sampling = SamplingParams
        self.records: dict[str, Any] = {}
        self.latest: dict[str, Any] = {}

    def begin(self, name: str, prompt: list[int], tokens: int, steps: int = 0) -> None:
        """Add a request; with ``steps`` run some steps and record how many tokens there are."""
        parameters = self.sampling(temperature=0.0, max_tokens=tokens, logprobs=TOP, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        for _ in range(steps):
            self._step()
        if steps:
            self.records[f"{name} before"] = _record(self.latest[name])

    def end(self, name: str) -> None:
        """Run until the request is finished."""
        while name not in self.latest or not self.latest[name].finished:
            self._step()
        self.records[name] = _record(self.latest[name])

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        """A request by itself."""
        self.begin(name, prompt, tokens)
        self.end(name)

    def sync(self, delta: str, kv: Any) -> None:
        """An update by refdelta's client."""
        from refdelta.vllm.calls.client import Client, LocalEngine

        client = Client(LocalEngine(self.llm))
        result = client.sync(delta, kv=kv, weight_version=kv)
        assert client.audit().holds
        self.records[f"sync {kv}"] = {
            "seconds": dict(result.seconds),
            "version": result.version,
            "digest": result.digest,
            "paused": client.status().paused,
            "weight_version": self.llm.get_weight_version(),
        }

    def write(self, delta: str) -> None:
        """An update by vLLM's own calls, with no pause around them."""
        assert not self.llm.llm_engine.is_sleeping()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"target_weights_path": delta}})
        self.llm.finish_weight_update()
        assert not self.llm.llm_engine.is_sleeping()

    def back(self, checkpoint: str) -> None:
        """Start over."""
        from refdelta.vllm.calls.client import Client, LocalEngine

        Client(LocalEngine(self.llm)).anchor(checkpoint, run_id="kv", version=0, kv="reset_prefix")

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            self.latest[output.request_id] = output


def _record(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    logprobs = [sorted((int(token), float(lp.logprob)) for token, lp in each.items()) for each in completion.logprobs]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "reason": completion.finish_reason,
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The records of all steps of a job: its ``checkpoint``, ``backend`` (or None) and ``steps``."""
    child = Child(job)
    for call, *arguments in job["steps"]:
        getattr(child, call)(*arguments)
    return child.records
