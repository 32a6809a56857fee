"""What the operator sees when an engine is up: machine, plan with reasons, limits, what would help."""

from __future__ import annotations

from freetoken.cli import _host
from freetoken.cli._session import Engine, Plan
from freetoken.cli._terminal import Progress, Terminal

DEMO_NAME = "freetoken-demo"
DEMO_NOTE = (
    "This is the embedded demo model: tiny, trained from scratch. It chats in short sentences, does small "
    "sums and calls tools well. It knows no facts: without a tool to look them up it says so."
)
DEMO_PROMPTS = ("Who are you?", "Tell me a joke.", "What is 347 + 586?", "What can you do?")


def banner(engine: Engine, progress: Progress, out: Terminal) -> None:
    """Print machine, model and plan of a loaded engine."""
    out.line(f"{out.bold('machine')}  {_host.machine_line()}")
    out.line(
        f"{out.bold('model')}    {engine.model_name}, up to {engine.plan.max_model_len} tokens of context"
    )
    if engine.model_name == DEMO_NAME:
        out.wrapped(DEMO_NOTE, indent="         ")
    lines = engine.plan.lines()
    out.line(f"{out.bold('plan')}     {lines[0]}")
    for line in lines[1:]:
        out.wrapped(line, indent="         ")
    limit, help_ = advice(engine.plan)
    out.line(f"{out.bold('limit')}    {limit}")
    out.line(f"{out.bold('helps')}    {help_}")
    details = progress.breakdown()
    seconds = f"{progress.seconds:.1f} s"
    out.line(f"{out.bold('loaded')}   in {seconds}" + (f" ({details})" if details else ""))


def advice(plan: Plan) -> tuple[str, str]:
    """(what limits this machine, what would help), from where the experts are computed."""
    if plan.device == "sim":
        return (
            "a simulated GPU: figures of speed are the preset machine's, not this one's",
            "--machine, --gpu-memory, --sim-link-bw and --sim-host-bw change what is simulated",
        )
    if plan.device == "cpu":
        return (
            "the CPU computes everything: how fast it reads memory bounds the speed of long answers",
            "an NVIDIA GPU (compute capability 8.0 or newer), more memory channels, a smaller weight format",
        )
    if plan.backend == "fused":
        return (
            "nothing about memory: all experts are on the GPU",
            "a GPU with faster memory, or a smaller weight format",
        )
    return (
        "expert misses: what isn't on the GPU comes over the link or is computed by the CPU",
        "more GPU memory first, then a wider link (PCIe x16), then faster host memory",
    )


def suggestions(out: Terminal) -> None:
    """Print prompts that work with the demo model."""
    out.line("  Try: " + "   ".join(out.accent(p) for p in DEMO_PROMPTS))
