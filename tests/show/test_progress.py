import pytest

from flowledger.show.progress import figures, progress

METRICS = {
    "reward/mean": 0.5, "entropy": 5.5, "ref_kl": 1e-3, "grad_norm": 1.0, "response_length/mean": 1234.0, "tokens_per_s": 123456.0,
}  # fmt: skip


def test_a_step_is_one_line_where_nobody_looks_at_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with progress("run", 2, quiet=False) as advance:
        advance(0, METRICS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 0 (1 of 2)  reward 0.500") and line == line.rstrip()


def test_kl_is_that_of_the_loss_or_of_the_reward() -> None:
    assert "kl 1.0e-03" in figures(METRICS)
    assert "kl 2.0e-03" in figures({"reward_kl": 2e-3})
    assert "kl" not in figures({"reward/mean": 1.0})
