"""Rollouts of jobs' models on the page of their deployment, where each can be undone."""

from tests.browser.scenes import Page, address, deploy, expect
from tests.unit.control_plane.routes.conftest import Server


def test_a_rollout_is_seen_step_by_step_and_undone(server: Server, page: Page) -> None:
    deployment = deploy(server, route_prefix="/chat")
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    expect(page.get_by_role("heading", name="Changes")).to_be_visible()
    expect(page.get_by_role("heading", name="Rollouts")).to_have_count(0)
    job = server.succeed(name="better", rollout={"deployment": deployment, "share": 0.25})
    server.tick()
    page.reload()
    table = page.get_by_role("region", name="Rollouts of jobs' models, newest first")
    expect(table).to_contain_text(job["id"])
    expect(table).to_contain_text("candidate, 25% of the requests")
    table.get_by_label("Reason").fill("wrong answers")
    table.get_by_role("button", name="Roll back").click()
    expect(table).to_contain_text("rolled back by local (wrong answers)")
    expect(table.get_by_role("button", name="Roll back")).to_have_count(0)
    assert server.get(f"/deployments/{deployment}")["candidate"] is None
