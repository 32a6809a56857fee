"""What prefetch is worth: decode replayed tile by tile, with rates instead of a device.

Routes are drawn as `synth_moe`-like checkpoints draw them (half of the experts follow a topic of 64 tokens,
the rest the token), guesses are the routes with noise on the logits. Residency is the device's: two_speed,
tiles divided between link and host so that both end together, the hottest misses filled, one expert cut.
Time is counted, not measured: a layer costs the slower of its branches, a step `--free` beside them, and
prefetch moves what the link can move in a layer's idle time. Prints one row a variant.

    python benchmarks/prefetch_replay.py --share 0.37 --noise 0 0.4 0.8 [--hole 0] [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import numpy as np

from freetoken.kernels.expert_step._rules import HOLE

LAYERS, EXPERTS, TOP_K, TILES, TILE_BYTES = 20, 128, 8, 24, 393_216
TOPICS, SEGMENT = 64, 64
LINK_FIXED_S, HOST_FIXED_S = 2e-6, 12e-6


def routes(steps: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Global expert ids [steps, layers, top_k], and guesses of the same shape."""
    rng = np.random.default_rng(seed)
    core = np.stack([rng.permutation(EXPERTS) < EXPERTS // 2 for _ in range(LAYERS)])
    common = 0.6 * rng.standard_normal(core.shape) * core
    topic = 0.8 * rng.standard_normal((*core.shape, TOPICS)) * core[..., None]
    own = np.where(core, 0.25, 0.8)
    order = rng.integers(0, TOPICS, steps // SEGMENT + 1)
    base = np.arange(LAYERS)[:, None] * EXPERTS
    out = []
    for step in range(steps):
        logits = common + topic[:, :, order[step // SEGMENT]] + own * rng.standard_normal(core.shape)
        guess = logits + noise * own * rng.standard_normal(core.shape)
        out.append([np.argsort(-values, 1)[:, :TOP_K] + base for values in (logits, guess)])
    both = np.array(out)
    return both[:, 0], both[:, 1]


@dataclass
class Replay:
    """Residency in tiles, and the time that steps would take."""

    num_slots: int
    link_bw: float
    host_bw: float
    free_s: float
    idle_s: float
    hole: int
    prefetch: bool
    hybrid: bool
    seconds: float = 0.0
    missing: int = 0
    brought: int = 0
    wanted: int = 0
    _owner: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        total = LAYERS * EXPERTS
        self._owner, self._tiles = np.full(self.num_slots, -1), np.zeros(self.num_slots, int)
        self._slot, self._fast, self._slow = np.full(total, -1), np.zeros(total, int), np.zeros(total, int)

    def have(self, experts: np.ndarray) -> np.ndarray:
        slots = self._slot[experts]
        return np.where(slots >= 0, self._tiles[np.maximum(slots, 0)], 0)

    def hottest(self, experts: np.ndarray) -> list[int]:
        return sorted(experts.tolist(), key=lambda e: (-(self._fast[e] + self._slow[e]), e))

    def bring(self, expert: int, tiles: int, kept: np.ndarray, passed: int) -> None:
        if self._slot[expert] < 0:
            keys = self._fast[self._owner] + self._slow[self._owner]
            keys = keys + np.where(self._owner > passed, keys >> 1, 0)
            keys = keys // (1 + self.hole * (TILES - self._tiles) // TILES)
            keys = np.where(self._owner < 0, -1, np.where(np.isin(self._owner, kept), 1 << 60, keys))
            slot = int(np.argmin(keys))
            if self._owner[slot] >= 0:
                self._slot[self._owner[slot]] = -1
            self._owner[slot], self._slot[expert], self._tiles[slot] = expert, slot, 0
        self._tiles[self._slot[expert]] += tiles

    def ahead(self, guess: np.ndarray, ids: np.ndarray, before: np.ndarray, layer: int) -> None:
        left = int(self.idle_s * self.link_bw / TILE_BYTES)
        for expert in self.hottest(guess[self.have(guess) < TILES]):
            tiles = min(TILES - int(self.have(np.array([expert]))[0]), left)
            if tiles <= 0:
                break
            self.bring(expert, tiles, np.concatenate([guess, before]), layer * EXPERTS - 1)
            left, self.brought = left - tiles, self.brought + tiles
            self.wanted += tiles * (expert in ids)

    def filled(self, missing: int) -> int:
        if not self.hybrid:
            return missing
        link, host = TILE_BYTES / self.link_bw, TILE_BYTES / self.host_bw
        balanced = (missing * host + HOST_FIXED_S - LINK_FIXED_S) / (link + host)
        return int(np.clip(round(balanced), missing // 16, missing))

    def layer_step(self, layer: int, ids: np.ndarray) -> None:
        self._fast[ids] += 1 << 17
        self._slow[ids] += 1 << 16
        need = TILES - self.have(ids)
        missing = int(need.sum())
        self.missing += missing
        if not missing:
            return
        fill = left = self.filled(missing)
        for expert in self.hottest(ids[need > 0]):
            tiles = min(TILES - int(self.have(np.array([expert]))[0]), left)
            if tiles > 0:
                self.bring(expert, tiles, ids, layer * EXPERTS + EXPERTS - 1)
                left -= tiles
        link = fill * TILE_BYTES / self.link_bw + LINK_FIXED_S
        host = (missing - fill) * TILE_BYTES / self.host_bw + HOST_FIXED_S if fill < missing else 0.0
        self.seconds += max(link, host)

    def run(self, real: np.ndarray, guessed: np.ndarray, warm_up: int) -> dict[str, float]:
        for step, (layers, guesses) in enumerate(zip(real, guessed, strict=True)):
            if step == warm_up:
                self.seconds, self.missing, self.brought, self.wanted = 0.0, 0, 0, 0
            self._fast -= self._fast >> 1
            self._slow -= self._slow >> 4
            for layer, ids in enumerate(np.sort(layers, 1)):
                if self.prefetch and layer:
                    self.ahead(guesses[layer], ids, layers[layer - 1], layer)
                self.layer_step(layer, ids)
            self.seconds += self.free_s
        steps = len(real) - warm_up
        return {
            "tok_s": round(steps / self.seconds, 1),
            "missing_share": round(self.missing / (steps * LAYERS * TOP_K * TILES), 4),
            "prefetched_mb": round(self.brought * TILE_BYTES / steps / 1e6, 1),
            "wanted_share": round(self.wanted / max(1, self.brought), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=0.37, help="slots as a share of the pool")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.4, 0.8], help="of the guesses")
    parser.add_argument("--link", type=float, default=46.8, help="GB/s")
    parser.add_argument("--host", type=float, default=75.0, help="GB/s beside the link")
    parser.add_argument("--free", type=float, default=1.41, help="ms of a step without misses")
    parser.add_argument("--idle", type=float, default=45.0, help="us a layer in which the link prefetches")
    parser.add_argument("--hole", type=int, default=HOLE, help="how much a victim's missing tiles count")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for noise in args.noise:
        real, guessed = routes(args.steps, noise, args.seed)
        pairs = zip(real.reshape(-1, TOP_K), guessed.reshape(-1, TOP_K), strict=True)
        recall = np.mean([np.isin(a, b).mean() for a, b in pairs])
        for hybrid in (True, False):
            for prefetch in (False, True):
                slots = int(args.share * LAYERS * EXPERTS)
                rates = (args.link * 1e9, args.host * 1e9, args.free / 1e3, args.idle / 1e6)
                made = Replay(slots, *rates, args.hole, prefetch, hybrid)
                found = made.run(real, guessed, args.steps // 2)
                rows.append(
                    {"backend": "hybrid" if hybrid else "offload", "recall": round(float(recall), 3)}
                    | {"prefetch": prefetch} | found
                )  # fmt: skip
                print(rows[-1], flush=True)
    if args.json:
        print(json.dumps({"bench": "prefetch_replay", "share": args.share, "rows": rows}))


if __name__ == "__main__":
    main()
