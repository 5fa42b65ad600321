"`python -m tests.zoo build`: see the package."

import argparse
import asyncio
import json
import time
import warnings

import torch

from .faults import PARTS, cases
from .judge import Answer, judged, tables


def options() -> argparse.Namespace:
    "The command line."
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("split", choices=PARTS)
    parser.add_argument("--alone", action="store_true", help="from the record alone, without a backend")
    parser.add_argument("--only", default="", help="kinds with this in their name, or a family, or a setting")
    parser.add_argument("--http", action="store_true", help="the server is reached through HTTP")
    parser.add_argument("--first", action="store_true", help="the first case of each kind")
    parser.add_argument("--limit", type=int, help="so many cases at most")
    parser.add_argument("--large", action="store_true", help="with the cases of SmolLM2, which are slow")
    parser.add_argument("--dry", action="store_true", help="run the cases, ask no doctor")
    parser.add_argument("--json", metavar="PATH", help="write the answers there")
    parser.add_argument("-v", action="store_true", dest="verbose", help="a line per case")
    return parser.parse_args()


async def main() -> None:
    "Judge the doctor on one part."
    args, begin, answers = options(), time.perf_counter(), list[Answer]()
    chosen = [c for c in cases(args.split) if args.only in c.kind.name or args.only in (c.kind.family, c.setting)]
    chosen = [c for c in chosen if args.large or c.setting != "large"]
    if args.first:
        chosen = [next(c for c in chosen if c.kind is kind) for kind in dict.fromkeys(c.kind for c in chosen)]
    for case in chosen[: args.limit]:
        answers.append(await judged(case, alone=args.alone, dry=args.dry, http=args.http))
    print("\n".join(tables(answers, args.verbose)))
    print(f"\n{len(answers)} cases in {time.perf_counter() - begin:.0f} s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([a.row for a in answers], file, indent=1)


if __name__ == "__main__":  # a process of the zoo imports this file, too
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    asyncio.run(main())
