"Recorded calls of the Fireworks cookbook's router replay, turned into calls of `align_routing`."

from __future__ import annotations

from golden_adapters import AGREED, Case, Outcome, adapter, assert_rejected

from rl_notebook.core.align import align_routing

NOT_RECORDED = "nothing recorded is None and the trainer chooses; it does not train"
NOTHING_SAMPLED = "a completion without tokens leaves every input unknown; it calls that missing"
EMPTY_IS_NOT_NONE = "an empty record is rejected, not read as absent"
NO_PROMPT = "an empty prompt is rejected; agrees with a prompt of one token where the record has one entry an input"
LONG_PROMPT = "a prompt longer than the sequence is rejected; it returns more entries than inputs"
CUT = "a record that is too long is rejected, not cut; agrees after cutting it"
PASSED_ON = "a record that is too short is rejected, not passed on"


def misfit(routing: list[str], prompt_len: int, inputs: int) -> tuple[str, str] | None:
    "(what our error is about, the difference if the other program continues) for a record that we reject."
    if not 1 <= prompt_len <= inputs + 1:
        return "prompt_len", NO_PROMPT if prompt_len < 1 else LONG_PROMPT
    sampled = inputs + 1 - prompt_len
    if len(routing) in (inputs, sampled):
        return None
    if not routing:
        return "routing", EMPTY_IS_NOT_NONE
    return "routing", CUT if len(routing) > sampled else PASSED_ON


@adapter("router_replay__*")
def router_replay(case: Case) -> Outcome:
    "Expert choices as a sampler returned them, one entry per input."
    x = case.inputs
    only = case.config["completion_only"]
    routing = x["routing_matrices"]
    p = x["prompt_len"]
    inputs = x["model_input_len"]
    want = case.expected["routing_matrices"]
    raises = "raises" in case.expected.get("validate", {})
    if routing is None:
        assert align_routing(None, p, inputs, only) is None
        assert raises or want is None
        return Outcome((NOT_RECORDED,)) if raises else AGREED
    if (reason := misfit(routing, p, inputs)) is not None:
        assert_rejected(lambda: align_routing(routing, p, inputs, only), reason[0])
        if raises:
            return AGREED
        if reason[1] == CUT:
            assert align_routing(routing[: inputs + 1 - p], p, inputs, only) == tuple(want)
        if reason[1] == NO_PROMPT and len(routing) == inputs:
            assert align_routing(routing, 1, inputs, only) == tuple(want)
        return Outcome((reason[1],))
    got = align_routing(routing, p, inputs, only)
    if not routing:
        assert got == ("",) * inputs
        assert raises or want is None
        return Outcome((NOTHING_SAMPLED,))
    assert not raises
    assert got == tuple(want)
    return AGREED
