"""Real HTML pages by the ten thousand: Debian's documentation packages, packed into WARC files.

``python benchmarks/debian_pages.py --out DIR`` downloads the packages with ``apt-get download`` (their index must be
current: ``apt-get update``), takes the HTML files out of each without installing it, at most ``--most`` a package, and
writes one WARC file of gzipped response records a group of packages. The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

LANGUAGES = {
    "debian-reference": "de en es fr it ja pt zh-cn zh-tw",
    "debian-faq": "de fr it ja nl ru zh-cn",
    "developers-reference": "de fr it ja ru",
    "maint-guide": "ca de es fr it ja ru zh-cn zh-tw",
    "aptitude-doc": "cs en es fi fr it ja nl ru",
    "gimp-help": "de el en es fr it ja ko ru sv uk zh-cn",
    "lilypond-doc-html": "ca cs de es fr hu it ja nl zh",
    "kicad-doc": "de es fr ja ru zh",
    "libreoffice-help": "de el es fr it ja pl pt-br ru zh-cn",
}
SINGLE = (
    "apache2-doc bash-doc cmake-doc debian-handbook debian-policy fp-docs-3.2.2 git-doc gnucash-docs "
    "installation-guide-amd64 lilypond-doc-html octave-doc postgresql-doc-15 python-django-doc python-pandas-doc "
    "python-scipy-doc python3.11-doc r-doc-html rust-doc samba-doc sqlite3-doc tomcat10-docs"
)


def packages() -> list[str]:
    """The packages asked for when none are named."""
    named = [f"{base}-{language}" for base, all_of in LANGUAGES.items() for language in all_of.split()]
    return sorted([*named, *SINGLE.split()])


def pages(package: str, most: int) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of every HTML file of a package that has at least 512 bytes, spread evenly down to ``most``."""
    with tempfile.TemporaryDirectory() as folder:
        got = subprocess.run(["apt-get", "download", "-q", package], cwd=folder, capture_output=True)
        archives = list(Path(folder).glob("*.deb"))
        if got.returncode or not archives:
            print(f"{package}: cannot be downloaded, left out", file=sys.stderr)
            return
        tar = Path(folder) / "files.tar"
        with tar.open("wb") as file:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archives[0])], stdout=file, check=True)
        with tarfile.open(tar) as members:
            found = [
                one
                for one in members
                if one.isreg() and one.name.lower().endswith((".html", ".htm", ".html.gz", ".xhtml"))
            ]
            found.sort(key=lambda one: one.name)
            if len(found) > most:
                found = [found[number * len(found) // most] for number in range(most)]
            for one in found:
                data = members.extractfile(one)
                assert data is not None
                body = data.read()
                body = gzip.decompress(body) if one.name.endswith(".gz") else body
                if len(body) >= 512:
                    yield one.name.removeprefix("./"), body


def pack(names: list[str], path: Path, most: int) -> int:
    """Write the pages of ``names`` as one WARC file; return their number."""
    count = 0
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for package in names:
            for name, body in pages(package, most):
                url = f"https://{package}.debian.example/{quote(name)}"
                headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
                record = writer.create_warc_record(
                    url,
                    "response",
                    payload=io.BytesIO(body),
                    length=len(body),
                    http_headers=headers,
                    warc_headers_dict={"WARC-Date": "2026-01-01T00:00:00Z", "WARC-Record-ID": record_id(url)},
                )
                writer.write_record(record)
                count += 1
    return count


def record_id(url: str) -> str:
    """A record id that is the same in every run."""
    first, second = zlib.crc32(url.encode()), zlib.crc32(url[::-1].encode())
    return f"<urn:uuid:{first:08x}-0000-4000-8000-{second:012x}>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the WARC files")
    parser.add_argument("--packages", nargs="+", help="packages instead of the list in this file")
    parser.add_argument("--most", type=int, default=900, help="pages taken of one package at most")
    parser.add_argument("--files", type=int, default=20, help="WARC files the packages are spread over")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.packages or packages()
    total = 0
    for number in range(options.files):
        group = names[number :: options.files]
        if group:
            path = options.out / f"debian-{number:05d}.warc.gz"
            count = pack(group, path, options.most)
            total += count
            print(f"{path.name}: {count} pages, {path.stat().st_size / 1e6:.1f} MB ({', '.join(group)})", flush=True)
    print(f"{total} pages")


if __name__ == "__main__":
    main()
