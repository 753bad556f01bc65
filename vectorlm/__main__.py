"""``python -m vectorlm``: the same as the ``vectorlm`` command."""

from vectorlm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
