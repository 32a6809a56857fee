"""/metrics, read back with the parser that Prometheus' own client has."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_llm import say, think_then_call

from freetoken.api.metrics import Metrics
from freetoken.api.observe import Served
from freetoken.core.generate import GAP_BOUNDS_S, GenerateParams, Timing
from freetoken.core.options import Options
from freetoken.llm import build_llm


def read(text: str | bytes) -> dict[str, Any]:
    """Families by name; a family that comes twice is an error."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode()):
        assert family.name not in found, family.name
        assert family.documentation, family.name
        found[family.name] = family
    return found


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    (found,) = [
        s.value for f in families.values() for s in f.samples if s.name == name and s.labels == labels
    ]
    return found


def test_requests_are_counted_under_the_names_that_dashboards_know(serve):
    served = serve(lambda _: think_then_call(), fresh=True)
    served.chat()
    served.chat(stream=True)
    served.chat(n=0)
    assert served.http.get("/v1/stats").json()["experts"] == {"hits": 3, "misses": 1}
    got = read(served.http.get("/metrics").text)
    path = "/v1/chat/completions"
    assert value(got, "freetoken_requests_total", path=path, status="200") == 2
    assert value(got, "freetoken_requests_total", path=path, status="400") == 1
    assert value(got, "freetoken_request_success_total", finished_reason="tool_calls") == 2
    assert value(got, "freetoken_generation_tokens_total") == 42
    assert value(got, "freetoken_prompt_tokens_total") == 14
    assert value(got, "freetoken_cached_tokens_total") == 8
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency", "time_per_output_token"):
        assert value(got, f"freetoken_{name}_seconds_count") == 2
        assert got[f"freetoken_{name}_seconds"].type == "histogram"
    assert value(got, "freetoken_inter_token_latency_seconds_count") == 6
    assert value(got, "freetoken_inter_token_latency_seconds_bucket", le="+Inf") == 6


def test_latencies_fall_into_their_buckets():
    metrics, timing = Metrics(), Timing(queued_s=0.25)
    for now_s in (1.0, 1.004, 1.104):
        timing.note(1, now_s)
    timing.note(2, 1.5)
    metrics.count(Served(started_s=0.5, first_s=1.0, finish="stop", timings=[timing]), "/p", 200, 1.5)
    got = read(metrics.render({}))
    assert value(got, "freetoken_time_to_first_token_seconds_sum") == 0.5
    assert value(got, "freetoken_request_queue_time_seconds_sum") == 0.25
    assert value(got, "freetoken_time_per_output_token_seconds_sum") == pytest.approx(0.125)
    assert value(got, "freetoken_inter_token_latency_seconds_sum") == pytest.approx(0.5)
    cumulative = [value(got, "freetoken_inter_token_latency_seconds_bucket", le=str(b)) for b in GAP_BOUNDS_S]
    expected = [sum(gap <= bound for gap in (0.004, 0.1, 0.198, 0.198)) for bound in GAP_BOUNDS_S]
    assert cumulative[3] == expected[3] == 1 and cumulative[-1] == expected[-1] == 4


def test_an_engines_own_figures_have_names_and_types_and_none_is_lost():
    llm = build_llm(Options(max_model_len=256))
    try:
        for request_id in ("a", "b"):
            list(llm.submit_text("Hello there", GenerateParams(max_tokens=3), request_id))
        stats = llm.stats()
    finally:
        llm.close()
    got = read(Metrics().render(stats))
    experts, engine = stats["experts"], stats["engine"]
    assert value(got, "freetoken_expert_misses_total") == experts["misses"] > 0
    assert value(got, "freetoken_expert_hits_total") == experts["hits"]
    assert value(got, "freetoken_expert_fills_total") == experts["fills"]
    assert value(got, "freetoken_expert_cpu_tiles_total") == experts["cpu_tiles"] > 0
    assert value(got, "freetoken_expert_bytes_total", tier="host") == experts["host_bytes"] > 0
    assert value(got, "freetoken_expert_bytes_total", tier="link") == experts["link_bytes"]
    alpha = experts["filled_tiles"] / experts["missing_tiles"]
    assert value(got, "freetoken_expert_split_alpha") == alpha
    assert value(got, "freetoken_prefix_cache_queries_total") == engine["prompt_tokens"] > 0
    assert value(got, "freetoken_prefix_cache_hits_total") == engine["cached_tokens"]
    assert value(got, "freetoken_num_requests_running") == value(got, "freetoken_num_requests_waiting") == 0
    assert value(got, "freetoken_pool_units", pool="kv") == stats["memory"]["kv_pages"]
    assert value(got, "freetoken_engine_engine_output_tokens") == engine["output_tokens"] == 6
    numbers = [v for group in stats.values() if isinstance(group, dict) for v in group.values()]
    engine_samples = [s for f in read(Metrics().render(stats)).values() for s in f.samples]
    assert len(engine_samples) > len([v for v in numbers if isinstance(v, (int, float))])


def test_streams_of_the_engine_tell_their_queue_and_gaps():
    llm = build_llm(Options(max_model_len=256))
    try:
        generation = llm.submit_text("Hello", GenerateParams(max_tokens=4, ignore_eos=True), "a")
        list(generation)
    finally:
        llm.close()
    assert generation.timing.tokens == 4 and sum(generation.timing.gap_counts) == 3
    assert 0 <= generation.timing.queued_s < 60 and generation.timing.gap_sum_s > 0


def test_a_client_that_leaves_is_counted_as_one(serve):
    served = serve(lambda _: say("a"))
    figures = Served(finish="disconnect")
    metrics = Metrics()
    metrics.count(figures, "/p", 499, figures.started_s + 1)
    assert value(read(metrics.render({})), "freetoken_client_disconnects_total") == 1
    assert served.http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
