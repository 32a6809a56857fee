# ruff: noqa: E501 - sentences and small makers read best on one line
"""Every text the demo model learns from, with its package and its licence.

Owns the list; knows nothing about parsing. Invariant: each licence is in PERMISSIVE, so that neither the weights nor the
shipped dictionary carry a copyleft term. A test checks that, and that the model card names every source.
"""

from dataclasses import dataclass

PERMISSIVE = frozenset(
    {
        "WordNet",
        "public domain",
        "PSF-2.0",
        "PostgreSQL",
        "Apache-2.0",
        "MIT",
        "MIT or Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
    }
)
PERMISSIVE |= {"Apache-2.0 with LLVM exception"}


@dataclass(frozen=True)
class Source:
    """One body of text.

    name      short name, as in the corpus and the model card
    package   Debian 12 package that carries it ("" = the Python that builds the corpus)
    licence   licence of the text
    globs     pages below usr/share, as glob patterns (HTML, plain or gzipped)
    megabytes at most this much text is kept
    """

    name: str
    package: str
    licence: str
    globs: tuple[str, ...] = ()
    megabytes: float = 12.0


_RUST = (
    "book",
    "rust-by-example",
    "reference",
    "nomicon",
    "embedded-book",
    "edition-guide",
    "rustc",
    "rustdoc",
    "cargo",
)

SOURCES = (
    Source("wordnet", "wordnet-base", "WordNet", megabytes=24.0),
    Source("jargon", "dict-jargon", "public domain"),
    Source("names", "wamerican", "public domain"),
    Source("docstrings", "", "PSF-2.0"),
    Source("python", "python3.11-doc", "PSF-2.0", ("doc/python3.11/html/*/*.html",)),
    Source("sqlite", "sqlite3-doc", "public domain", ("doc/sqlite3/*.html", "doc/sqlite3/c3ref/*.html")),
    Source("postgresql", "postgresql-doc-15", "PostgreSQL", ("doc/postgresql-doc-15/html/*.html",)),
    Source("apache", "apache2-doc", "Apache-2.0", ("doc/apache2-doc/manual/en/**/*.html",)),
    Source("rust", "rust-doc", "MIT or Apache-2.0", tuple(f"doc/rust-doc/html/{d}/**/*.html" for d in _RUST)),
    Source("nodejs", "nodejs-doc", "MIT", ("doc/nodejs/api/*.html",)),
    Source("cmake", "cmake-doc", "BSD-3-Clause", ("doc/cmake-data/html/*/*.html",), 4.0),
    Source("sqlalchemy", "python-sqlalchemy-doc", "MIT", ("doc/python-sqlalchemy-doc/html/**/*.html",), 5.0),
    Source("django", "python-django-doc", "BSD-3-Clause", ("doc/python-django-doc/html/**/*.html",)),
    Source("jinja", "python-jinja2-doc", "BSD-3-Clause", ("doc/python-jinja2-doc/html/**/*.html",)),
    Source("requests", "python-requests-doc", "Apache-2.0", ("doc/python-requests-doc/html/**/*.html",)),
    Source("scrapy", "python-scrapy-doc", "BSD-3-Clause", ("doc/python-scrapy-doc/html/**/*.html",), 3.0),
    Source(
        "pandas",
        "python-pandas-doc",
        "BSD-3-Clause",
        (
            "doc/python-pandas-doc/html/user_guide/*.html",
            "doc/python-pandas-doc/html/getting_started/**/*.html",
        ),
        4.0,
    ),
    Source(
        "scipy", "python-scipy-doc", "BSD-3-Clause", ("doc/python-scipy-doc/html/tutorial/**/*.html",), 3.0
    ),
    Source(
        "scikit-learn",
        "python-sklearn-doc",
        "BSD-3-Clause",
        ("doc/python-sklearn-doc/html/stable/modules/*.html", "doc/python-sklearn-doc/html/modules/*.html"),
        4.0,
    ),
    Source("llvm", "llvm-14-doc", "Apache-2.0 with LLVM exception", ("doc/llvm-14-doc/html/*.html",), 5.0),
)

PACKAGES = tuple(s.package for s in SOURCES if s.package)
