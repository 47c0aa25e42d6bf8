"""``tune models``: what can be tuned by name."""

from __future__ import annotations

from optimizer.arguments.values import Parser


def main(arguments: list[str]) -> int:
    parser = Parser(prog="tune models", description="The models that come with tune, and those in ./configs.")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(arguments)
    from optimizer.listing import print_models

    print_models(as_json=given.json)
    return 0
