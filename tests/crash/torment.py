"""Kills at random moments: whom and when comes from a seeded generator, what is hit depends on the machine."""

from __future__ import annotations

import random
import signal

from tests.crash.harness import Ending, Run

LONGEST_DELAY_SECONDS = 0.6
MOST_AGENT_KILLS = 4
"""Per trainer: after more deaths within a minute it rightly gives the agent up."""


def torment(run: Run, seed: int, kills: int, reference: Ending) -> int:
    """Kill up to `kills` times, then let the run end; check everything. Returns how many kills hit something."""
    chance = random.Random(seed)
    landed, agent_kills = 0, 0
    trainer = run.start()
    for _ in range(kills):
        victim = chance.choice(("trainer", "agent", "both"))
        if trainer.has_ended(chance.uniform(0, LONGEST_DELAY_SECONDS)):
            break
        if victim == "agent":
            if agent_kills < MOST_AGENT_KILLS and run.kill_agents():
                landed, agent_kills = landed + 1, agent_kills + 1
            continue
        landed += trainer.kill()
        if victim == "both":
            run.kill_agents()
        if trainer.wait() == 0:
            break  # it was faster
        assert trainer.wait() == -signal.SIGKILL, trainer.log()
        trainer, agent_kills = run.start(), 0
    assert trainer.wait() == 0, trainer.log()
    run.check_identical(reference)
    run.finish()  # an agent that was killed in its last prune left a directory: the next start removes it
    run.check_identical(reference)
    run.check_nothing_left()
    return landed
