"""What every command does with input that it cannot use: one line, exit code 2."""

import pytest


def refuse(main, arguments, capsys):
    """Calls main(arguments), which must refuse them with exit code 2 -> its one line on stderr"""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and len(error.splitlines()) == 1, error
    return error
