#!/usr/bin/env python3
"""Checks subjects of commits: `area: verb what`, an imperative summary of at most 72 characters.

    git log --no-merges --format='%h %s' COMMIT..HEAD | tools/subjects.py

A few forms are recognised by their verb: "adds", "added" and "adding" are no imperatives, and "what was lent" has no verb at all.
"""

import re
import sys

MAX_LENGTH = 72
FORM = re.compile(r"[a-z0-9][a-z0-9_./-]*(, [a-z0-9][a-z0-9_./-]*)*: [a-z]")
# Words that end like another form of a verb and are none.
VERBS = {"address", "bypass", "pass", "process", "focus", "press", "discuss", "express", "compress", "access", "guess", "suppress",
         "bring", "string", "embed", "feed", "need", "seed", "speed", "shed", "bed", "embed", "bias", "alias", "canvas", "cross"}
NO_VERBS = {"a", "an", "the", "what", "which", "whether", "how", "why", "where", "when", "who", "of", "as", "for", "in", "on", "at",
            "to", "it", "its", "this", "that", "these", "those", "no", "not", "nothing", "more", "some", "all", "new", "one", "two"}


def problem(subject):
    """What is wrong with a subject, or None."""
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters, expected at most {MAX_LENGTH}"
    if not FORM.match(subject):
        return "is not of the form `area: verb what`"
    verb = re.match(r"[a-z-]+", subject.split(": ", 1)[1])[0]
    if verb in NO_VERBS or (verb not in VERBS and re.search(r"(?<!s)s$|ed$|ing$", verb)):
        return f"begins with `{verb}`, expected a verb in the imperative"
    return None


def main():
    failed = False
    for line in sys.stdin:
        commit, _, subject = line.rstrip("\n").partition(" ")
        if wrong := problem(subject):
            print(f"{commit}: `{subject}` {wrong}")
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
