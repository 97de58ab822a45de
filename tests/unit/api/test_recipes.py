"""Recipes: what ships with the platform is listed whole, and each could be submitted."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.unit.api.conftest import Server


def test_every_recipe_is_listed_with_its_comments_and_a_spec_that_is_accepted_as_such(server: Server) -> None:
    listed = {row["id"]: row for row in server.get("/recipes")["data"]}
    assert sorted(listed) == sorted(path.stem for path in Path("jobs/recipes").glob("*.yaml"))
    demo = listed["builtin-python-5m"]
    assert demo["description"].startswith("The demo's job: the teacher that ships with the package")
    assert "# three to four minutes" in demo["text"], "comments stay"
    assert "yaml-language-server" not in demo["text"]
    assert yaml.safe_load(demo["text"])["training"]["max_steps"] == demo["spec"]["training"]["max_steps"] == 100
