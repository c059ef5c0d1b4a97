"""Count the idle time of pipeline stages, from the order in which real ranks run: 1F1B and ZB-H1.

Forward, gradients of activations and gradients of weights cost one unit each.
"""

import json

import mindspeed
from tests.gpt.layout import Layout
from tests.gpt.turns import idle
from tests.ranks import run_ranks

LAYOUT = Layout(pp=4, micro_batch=1)


def turns_of(schedules):
    """Return the turns of this rank's stage under each schedule."""
    from megatron.core import parallel_state

    from tests.gpt.training import Training
    from tests.gpt.turns import recorded_turns

    found = []
    for features in schedules:
        mindspeed.enable(**features)
        training = Training(LAYOUT)
        with recorded_turns() as turns:
            training.step()
        found.append([turn for turn in turns if turn[0] in "FBW"])
        parallel_state.destroy_model_parallel()
    return found


def main():
    """Run both schedules on four ranks; print a JSON line."""
    ranks = run_ranks(turns_of, LAYOUT.pp, [{}, {"schedules_method": "zb-h1"}])
    plain, ours = zip(*ranks, strict=True)
    before = sum(idle(list(plain), {"F": 1, "B": 2}))
    after = sum(idle(list(ours), {"F": 1, "B": 1, "W": 1}))
    line = {"stages": LAYOUT.pp, "micro_batches": LAYOUT.micro_batches}
    print(json.dumps(line | {"idle_1f1b": before, "idle_zb_h1": after}), flush=True)


if __name__ == "__main__":
    main()
