"""What the Python library does with a hub and with a cache, for the test that runs it.

    agrees.py push FOLDER REPO      uploads a folder
    agrees.py pull REPO FOLDER      downloads a repository into a folder
    agrees.py cached REPO [TYPE]    prints where the cache has a repository, offline
"""

import sys

from huggingface_hub import HfApi, scan_cache_dir, snapshot_download

what, *args = sys.argv[1:]
if what == "push":
    folder, repo = args
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    print(api.upload_folder(folder_path=folder, repo_id=repo, commit_message="by Python").oid)
elif what == "pull":
    repo, folder = args
    print(snapshot_download(repo, local_dir=folder))
else:
    repo, kind = (*args, "model")[:2]
    cache = scan_cache_dir()
    assert not cache.warnings, cache.warnings
    assert repo in {found.repo_id for found in cache.repos}, cache
    print(snapshot_download(repo, repo_type=kind, local_files_only=True))
