"""(e) What becomes of training when Adam's moments come back from each code: worst loss in the ten steps after the
restore, and the loss 100 steps on against the uninterrupted run. Parameters are exact but where it is said.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from report import interval, rows, save, wait_while_quiet
from schemes import chain
from workloads import KINDS, State, Workload

from stepwell.storage.codecs.codec_spec import LC, Ternary
from stepwell.storage.codecs.lossless import top_codes, top_values

FAILURE, INTERVAL, AHEAD = 250, 25, 100
Arms = dict[str, tuple[State, State, State]]


def moments(work: Workload, key: str) -> State:
    return {name: work.optimizer.state[p][key].numpy().copy() for name, p in work.model.named_parameters()}


def top(state: State, mantissa: int) -> State:
    return {name: top_values(top_codes(value.reshape(-1), mantissa), mantissa).reshape(value.shape)
            for name, value in state.items()}  # fmt: skip


def arms(params: list[State], first: list[State], second: list[State]) -> Arms:
    """Parameters, first and second moments as each way brings them back. Chains of moments start at zero."""
    u, m, v = params[-1], first[-1], second[-1]
    none = {name: np.zeros_like(value) for name, value in m.items()}
    bf16 = {name: (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for name, value in v.items()}
    return {
        "all exact (control)": (u, m, v),
        "m top(0), v top(3): the default": (u, top(m, 0), top(v, 3)),
        "m top(0), v top(0)": (u, top(m, 0), top(v, 0)),
        "parameters lc(bits=3), m top(0), v top(3)": (chain(LC(3), params).state, top(m, 0), top(v, 3)),
        "m by a chain of lc(bits=3), v exact": (u, chain(LC(3), first).state, v),
        "m zero, v cut to bfloat16": (u, none, bf16),
        "m and v zero": (u, none, none),
        "v by a chain of lc(bits=3) (refused by stepwell)": (u, m, clip(chain(LC(3), second).state)),
        "v by a chain of ternary (refused by stepwell)": (u, m, clip(chain(Ternary(), second).state)),
        "v zero, m exact": (u, m, none),
    }


def clip(state: State) -> State:
    """A second moment below zero has no root."""
    return {name: np.maximum(value, 0) for name, value in state.items()}


def trials(name: str, folder: Path, seed: int) -> list[dict]:
    work = Workload(KINDS[name], folder, seed)
    base = work.state()
    zeros = {key: np.zeros_like(value) for key, value in base.items()}
    params, first, second = [base], [zeros], [zeros]
    for iteration in range(1, FAILURE + 1):
        work.step(iteration)
        if iteration % INTERVAL == 0:
            params.append(work.state())
            first.append(moments(work, "exp_avg"))
            second.append(moments(work, "exp_avg_sq"))
    optimizer, found, control = copy.deepcopy(work.optimizer.state_dict()), [], None
    for arm, (u, m, v) in arms(params, first, second).items():
        wait_while_quiet()
        work.load(u, copy.deepcopy(optimizer))
        with torch.no_grad():
            for key, p in work.model.named_parameters():
                work.optimizer.state[p]["exp_avg"].copy_(torch.from_numpy(m[key].reshape(p.shape).copy()))
                work.optimizer.state[p]["exp_avg_sq"].copy_(torch.from_numpy(v[key].reshape(p.shape).copy()))
        losses = []
        for k in range(1, AHEAD + 1):
            work.step(FAILURE + k)
            if k <= 10 or k == AHEAD:
                losses.append(work.loss())
        control = losses if control is None else control
        zero = [float(((v[key] == 0) & (second[-1][key] > 0)).mean()) for key in v]
        worst, ahead = float(np.nanmax(losses[:10])), losses[-1] - control[-1]
        facts = {"worst": worst, "control": max(control[:10]), "ahead": ahead, "zeros": float(np.mean(zero))}
        found.append({"workload": name, "seed": seed, "arm": arm, **facts})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [t for seed in options.seeds.split(",") for t in trials("lenet-adam/fashion", options.data, int(seed))]
    names = list(dict.fromkeys(t["arm"] for t in found))
    by_arm = {arm: [t for t in found if t["arm"] == arm] for arm in names}
    lines = [
        [arm, f"{np.mean([t['worst'] for t in own]):.4g}", f"{np.mean([t['control'] for t in own]):.4g}",
         f"{np.mean([t['ahead'] for t in own]):+.4g} +- {interval([t['ahead'] for t in own]):.2g}",
         f"{np.mean([t['zeros'] for t in own]):.1%}"]
        for arm, own in by_arm.items()
    ]  # fmt: skip

    def draw(pyplot) -> None:
        _, axis = pyplot.subplots(figsize=(9, 4))
        axis.barh(names[::-1], [np.mean([t["worst"] for t in by_arm[arm]]) for arm in names[::-1]], color="#7a8fa6")
        axis.set_xscale("log")
        axis.set_xlabel("worst loss in the ten steps after the restore")

    header = [
        "restored",
        "worst loss in 10 steps",
        "of the control",
        "loss at +100, against the control",
        "v that became 0",
    ]
    save(
        "moments", "Adam's moments, LeNet-5 on Fashion-MNIST", {"trials": found}, rows(header, lines), draw, options.out
    )


if __name__ == "__main__":
    main()
