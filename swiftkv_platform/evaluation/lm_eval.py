"""`lm_eval` for SwiftKV checkpoints: the harness's own command, with the SwiftKV classes registered.

    python -m swiftkv_platform.evaluation.lm_eval --model hf --model_args pretrained=DIR --tasks gsm8k

All arguments are the harness's. From Python, `import swiftkv_platform.model` before `lm_eval` has the same effect.
"""

from __future__ import annotations

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.installing import make_install_command


def main() -> None:
    """Run `lm_eval` with this process's arguments."""
    import swiftkv_platform.model  # noqa: F401 (registers the classes)

    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"this command needs {error.name}; use {make_install_command('eval')}") from error
    cli_evaluate()


if __name__ == "__main__":
    main()
