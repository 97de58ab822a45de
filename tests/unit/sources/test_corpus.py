"""The built-in text: a split that does not depend on the machine."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.sources.corpus import is_held_out, standard_library_modules


def test_split_goes_by_name_alone() -> None:
    held_out = [name for name in ("plistlib", "secrets", "tty", "json.decoder", "ast", "abc") if is_held_out(name)]
    assert held_out == ["plistlib", "secrets", "tty"]


def test_standard_library_has_text_on_both_sides() -> None:
    modules = list(standard_library_modules())
    held_out = [module for module in modules if module.held_out]
    assert len(modules) > 300
    assert 0.01 < len(held_out) / len(modules) < 0.10
    assert not any("site-packages" in module.name for module in modules)


def test_only_modules_with_readable_text_count(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "secrets.py").write_text("y = 2\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("z = 3\n")
    assert [(m.name, m.text) for m in standard_library_modules(root=tmp_path)] == [
        ("package", "x = 1\n"),
        ("secrets", "y = 2\n"),
    ]
    assert [m.name for m in standard_library_modules(root=tmp_path, include_tests=True)][-1] == "test.test_x"
