"""Test the geometry of the attempt ribbon: a job's life on one line, without hidden or overlapping parts."""

from datetime import UTC, datetime, timedelta

from jobs.presenting.job_page.ribbon import AttemptSpan, Ribbon, RibbonSave, draw

START = datetime(2026, 11, 19, 18, 22, tzinfo=UTC)


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def life() -> Ribbon:
    """Out of memory, preempted, failed, running: as on the design's page."""
    pieces = [
        AttemptSpan(number=1, state="out_of_memory", began=START, started=at(0.7), ended=at(4.3), lost_from=at(3.6)),
        AttemptSpan(number=2, state="preempted", began=at(4.4), started=at(5.2), ended=at(17), resumed_from=at(3.6)),
        AttemptSpan(
            number=3,
            state="failed",
            began=at(17.1),
            started=at(17.8),
            ended=at(32.6),
            note="XID 79 · 312 steps lost",
            lost_from=at(32.5),
        ),
        AttemptSpan(number=4, state="running", began=at(32.65), started=at(32.7), resumed_from=at(32.5)),
    ]
    saves = [RibbonSave(at=at(hour), state="verified") for hour in (2, 3.6, 8, 12, 20, 30, 32.5)]
    saves.append(RibbonSave(at=at(38), state="committed", url="/c"))
    return draw(pieces, saves, now=at(38.9), done_at=at(54.8), limit_at=at(56.7))


def test_segments_follow_each_other_inside_the_drawing() -> None:
    segments = life().segments
    assert [s.number for s in segments] == [1, 2, 3, 4]
    assert all(s.x >= 0 and s.end <= 100.001 for s in segments)
    assert all(a.end <= b.x + 0.001 for a, b in zip(segments, segments[1:], strict=False))


def test_lost_work_is_visible_even_when_it_was_little() -> None:
    first, second, third, _ = life().segments
    assert first.lost_x is not None
    assert first.lost_width > 1
    assert second.lost_x is None, "a segment that lost nothing has no hatch"
    assert third.lost_width == 1.0, "six minutes are widened to be seen"
    assert third.lost_x == round(third.end - 1.0, 3)


def test_now_estimate_and_limit_are_in_order() -> None:
    ribbon = life()
    assert ribbon.now is not None
    assert ribbon.done is not None
    assert ribbon.limit is not None
    assert ribbon.segments[-1].end == ribbon.now < ribbon.done < ribbon.limit <= 100
    assert ribbon.done_label.startswith("done ")


def test_the_limit_is_named_where_it_does_not_run_into_now() -> None:
    ribbon = Ribbon(now=2.0, limit=4.0)
    assert not ribbon.names_limit
    for now, limit, named in ((2.0, 30.0, True), (90.0, 92.0, False), (90.0, 97.0, True), (None, 50.0, True)):
        assert Ribbon(now=now, limit=limit).names_limit is named
    assert not Ribbon(now=50.0).names_limit


def test_labels_never_meet() -> None:
    marks = life().marks
    assert [m.state for m in marks] == ["out_of_memory", "preempted", "failed"]
    assert marks[0].side == "right"
    assert marks[2].side == "left", "`now` is close on its right"
    assert marks[2].label == "XID 79 · 312 steps lost"


def test_brackets_join_a_checkpoint_with_the_attempt_that_began_there() -> None:
    ribbon = life()
    assert len(ribbon.brackets) == 2
    assert all(start < end for start, end in ribbon.brackets)
    assert ribbon.brackets[1][1] == ribbon.segments[3].x


def test_the_newest_tick_stands_out() -> None:
    ticks = life().ticks
    assert ticks[-1][1] == "tick soft newest", "committed, not yet verified"
    assert all("newest" not in reading for _, reading, *_ in ticks[:-1])


def test_ten_thousand_checkpoints_are_thinned_but_the_newest_and_the_damaged_stay() -> None:
    pieces = [AttemptSpan(number=1, state="running", began=START, started=START)]
    saves = [
        RibbonSave(at=START + timedelta(seconds=i), state="corrupt" if i == 5001 else "verified") for i in range(10_000)
    ]
    ticks = draw(pieces, saves, now=at(3)).ticks
    assert len(ticks) <= 262
    assert "newest" in ticks[-1][1]
    assert any(reading == "corrupt" for _, reading, *_ in ticks)


def test_a_short_life_under_a_long_limit_is_not_squeezed() -> None:
    pieces = [AttemptSpan(number=1, state="running", began=START, started=START + timedelta(seconds=2))]
    now = START + timedelta(seconds=60)
    ribbon = draw(pieces, [], now=now, done_at=now + timedelta(seconds=60), limit_at=START + timedelta(days=3))
    assert ribbon.now is not None
    assert ribbon.now > 30
    assert ribbon.limit is None, "beyond the drawing"
    assert 2 <= len(ribbon.axis) <= 8


def test_waiting_is_a_line_and_no_segment() -> None:
    ribbon = draw([AttemptSpan(number=1, state="pending", began=START)], [], now=at(1))
    assert not ribbon.segments
    assert len(ribbon.waits) == 1
    assert "pending 1" in ribbon.waits[0][2]


def test_ended_at_once_still_draws() -> None:
    ribbon = draw([AttemptSpan(number=1, state="failed", began=START, started=START, ended=START)], [], now=at(1))
    assert ribbon.segments[0].width > 0


def test_nights_and_days_are_marked() -> None:
    ribbon = life()
    assert len(ribbon.nights) >= 2
    assert any(tick.is_day and tick.text.startswith("Fri 20") for tick in ribbon.axis)


def test_the_life_is_described_in_words_too() -> None:
    words = life().words
    assert words.startswith("4\N{NO-BREAK SPACE}attempts since")
    assert "Attempt 3 ended" in words
    assert "Attempt 4 is running" in words
    assert "Done about" in words
