#!/usr/bin/env python3
"""Finds prose that an English-speaking engineer would stumble over, in comments, messages and pages.

    tools/prose.py [PATH…]           every tracked file below PATH (default: the whole tree)
    tools/prose.py --since COMMIT    only lines added since COMMIT

It knows marks, not style: a page without marks is not therefore good. A line with `prose: ok` is skipped; give the reason there.
The exit status is 1 if there is a phrase or a long sentence, more than 40 openings, or more than 10 lines with `prose: ok`.
"""

import argparse
import collections
import re
import subprocess
import sys

MOST_OPENINGS = 40
MOST_EXCEPTIONS = 10
# Words of a sentence that need no second reading.
LONG = 38
KINDS = (".rs", ".md", ".yaml", ".py", ".sh", ".js", ".html", ".toml", ".cu")
# Quotations, generated text, and this list.
EXCLUDED = ("tools/prose.py", "/tests/data/", "/golden/")
# Phrases, and what to write in their place.
PHRASES = [(re.compile(pattern, re.I), better) for pattern, better in [
    (r"\bgo(?:es|ing)? on (?:from|with)\b", "resume from, continue with"),
    (r"\bwent on from\b", "resumed from"),
    (r"\bwhat there is not\b", "unsupported"),
    (r"\bthere is no such\b(?! file| directory| column| row| name| flag| tensor| key)", "… does not exist, is unsupported"),
    (r"\b(?:can|could|cannot|can't) be had\b", "is (not) available"),
    (r"\b(?:is|are|was|were|be) told (?!apart)", "is reported, the user sees"),
    (r"\bat hand\b", "available"),
    (r"\bwhere (?:it|they) lies?\b", "in place"),
    (r"\b(?:that|which) (?:is|are) whole\b", "complete"),
    (r"\bthe like\b", "and similar"),
    (r"\bwho(?:so)?ever\b", "the caller, the user, anyone who"),
    (r"\bin its (?:own )?turn\b", "then"),
    (r"\bas often as\b", "as many times as"),
    (r"\bof itself\b|\bby itself\b(?= (?:when|if|on))", "automatically"),
    (r"\b(?:has|have|had) not met\b", "has never run on, has never seen"),
    (r"\bbring(?:s|ing)? (?:a|its|their|his) own\b", "includes its own"),
    (r"\bmade of\b(?= (?:a|the) (?:row|file|run))", "built from"),
    (r"\b(?:broke|breaks?|broken) off\b", "was interrupted"),
    (r"\bsa(?:id|y so) plainly\b", "stated"),
    (r"\bmend(?:s|ed|ing)?\b", "fix"),
    (r"\bthe other way (?:a)?round\b", "the reverse"),
    (r"\bthat (?:many|much)\b", "give the quantity"),
    (r"\bstands? in\b(?= (?:the|a|`|\[))", "is in"),
    (r"\bof the (?:one|other)\b", "name the thing"),
    (r"\bhas it that\b|\bhas none of\b", "does not have"),
    (r"\bnothing of (?:it|them|that|this)\b", "none of it"),
    (r"\basks? for what\b", "is unsupported"),
    (r"\bno more than once\b", "at most once"),
]]
# A comment or sentence that begins with a dangling word: it has no subject, or a question as its subject.
OPENING = re.compile(r"^(?:What|Of|As|Those|That which|Half of|Whose|Its|Their|The same(?: as| for)?\b(?=[ .]))(?=[\s.,])")


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def is_prose(path):
    return path.endswith(KINDS) and not any(part in path for part in EXCLUDED)


def lines(paths, since):
    """Yields path, number and text of the lines to look at."""
    if since is None:
        for path in filter(is_prose, git("ls-files", "--", *(paths or ["."])).splitlines()):
            try:
                with open(path, encoding="utf-8") as file:
                    yield from ((path, number, line.rstrip("\n")) for number, line in enumerate(file, 1))
            except (OSError, UnicodeDecodeError):
                continue
        return
    path, number = None, 0
    for line in git("diff", "-U0", "--no-color", since, "--", *(paths or ["."])).splitlines():
        if line.startswith("+++ "):
            path = line[6:] if line.startswith("+++ b/") and is_prose(line[6:]) else None
        elif header := re.match(r"@@ -\S+ \+(\d+)", line):
            number = int(header[1])
        elif line.startswith("+") and path:
            yield path, number, line[1:]
            number += 1


def prose(path, line):
    """The prose of a line, and whether a sentence may begin there; None for code."""
    if path.endswith((".rs", ".cu")):
        if comment := re.match(r"\s*//[/!]?\s?(.*)", line):
            return comment[1], True
        strings = re.findall(r'"((?:[^"\\]|\\.){12,})"', line)
        return (" ".join(strings), False) if strings else None
    if path.endswith(".md"):
        return re.sub(r"^[\s>|*#-]+", "", line), True
    comment = re.match(r"\s*(?:#|//)\s?(.*)", line)
    return (comment[1], True) if comment else None


def marks(paths, since):
    previous = (None, 0, "")
    for path, number, line in lines(paths, since):
        if "prose: ok" in line:
            yield "exception", path, number, line.strip()[:90]
        if "prose: ok" in line or (found := prose(path, line)) is None:
            previous = (path, number, "")
            continue
        text, opens = found
        bare = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "X", text)
        for pattern, better in PHRASES:
            if match := pattern.search(bare):
                yield "phrase", path, number, f"“{match[0]}”: {better}"
        continues = previous[:2] == (path, number - 1) and previous[2] and not re.search(r"[.:!?`|]\s*$", previous[2])
        if opens and not continues and OPENING.match(text):
            yield "opening", path, number, text[:90]
        if path.endswith(".md"):
            for sentence in re.split(r"(?<=[.!?])\s+|\||<br>", bare):
                if len(sentence.split()) > LONG:
                    yield "long sentence", path, number, sentence[:90] + " …"
        previous = (path, number, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--since")
    arguments = parser.parse_args()
    counts = collections.Counter()
    for kind, path, number, what in marks(arguments.paths, arguments.since):
        counts[kind] += 1
        print(f"{path}:{number}: {kind}: {what}")
    print(f"{sum(counts.values())} marks ({', '.join(f'{n} × {kind}' for kind, n in sorted(counts.items())) or 'none'})")
    too_many = counts["opening"] > MOST_OPENINGS or counts["exception"] > MOST_EXCEPTIONS
    sys.exit(bool(counts["phrase"] or counts["long sentence"] or too_many))


if __name__ == "__main__":
    main()
