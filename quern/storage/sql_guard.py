"""Checks user SQL: only one query that reads the views is allowed.

DuckDB can forbid all of its files to a query or none of a folder's: where a view may read, ``COPY … TO`` may write, and
since DuckDB 2.0 it may stand inside a ``WITH``. So the query's own syntax tree, by DuckDB's own parser, is looked at,
and every node, table and table function in it must be one that only reads, and every function one that tells nothing of
this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from quern.errors import InputError, first_line

if TYPE_CHECKING:
    import duckdb

__all__ = ["check", "check_condition"]

#: Queries, what they read from, and what is done to their rows.
_NODES = frozenset({
    "SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE",
    "BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EMPTY", "EXPRESSION_LIST", "PIVOT", "SHOW_REF",
    "ORDER_MODIFIER", "LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER", "DISTINCT_MODIFIER",
    "ORDER_DEFAULT", "ASCENDING", "DESCENDING",
})  # fmt: skip

#: Table functions that make rows of their arguments and reach nothing else.
_FUNCTIONS = frozenset({"generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest"})

#: Functions of expressions that tell of the machine. None writes.
_TELLING = frozenset({"current_setting", "getenv"})

#: What tells the time or the user and is a column to DuckDB's parser, or always the same to its table of functions.
_OF_NOW = frozenset({"age", "ago", "localtime", "localtimestamp", "session_user", "user", "version"})

_WORD = re.compile(r"\w+")

_CATALOG = "information_schema"
_CATALOG_TABLES = frozenset({"columns", "tables"})
_LISTS = ('"tables"', "__show_tables_expanded")
"""What SHOW TABLES, SHOW ALL TABLES and DESCRIBE without a name are to DuckDB's parser."""
_DATABASE = "memory"
"""DuckDB's name of ours."""
_OF_PATHS = frozenset("/\\.:*?[")
"""What a name that stands for a query does not need, and the name of a file has."""


def check(connection: duckdb.DuckDBPyConnection, sql: str, views: Collection[str]) -> frozenset[str]:
    """The names of the ``views`` that a query reads (all of them for a bare ``SHOW TABLES``).

    Raises:
        InputError: it does not parse, is not exactly one query, writes, or reads something else than the views.
    """
    tree = _parse(connection, sql)
    own = connection.execute(
        "SELECT view_name FROM duckdb_views() WHERE internal AND schema_name <> ?", [_CATALOG]
    ).fetchall()
    return _views(list(_dicts(tree["statements"])), {name.lower() for name in views}, {name.lower() for (name,) in own})


def check_condition(connection: duckdb.DuckDBPyConnection, condition: str, table: str) -> None:
    """Refuse what is not one condition on the columns of a row of ``table`` (text of a FROM clause), of functions that
    give the same for the same row at any time.

    Raises:
        InputError: it does not parse, is more than a condition, holds a query, or a function tells more than the row.
    """
    nodes = _parse(connection, f"SELECT 1 FROM {table} WHERE (\n{condition}\n)")
    (statement,) = nodes["statements"]
    node = statement["node"]
    more = node["type"] != "SELECT_NODE" or any(
        node.get(part) for part in ("modifiers", "group_expressions", "having", "qualify", "sample")
    )
    inside = list(_dicts(node["where_clause"])) if not more else []
    odd = ("WINDOW", "STAR")
    if more or any(str(own.get("type", "")).endswith("_NODE") or own.get("class") in odd for own in inside):
        raise InputError("expected one condition on the columns of a document, without a query in it")
    unstable = _unstable(connection)
    for own in inside:
        names = own.get("column_names") or [""]
        name = str(own.get("function_name") or (names[0] if len(names) == 1 else "")).lower()
        is_function = own.get("class") == "FUNCTION" and name in unstable
        if is_function or name in _OF_NOW or name.startswith("current_"):
            raise InputError(f"{name}: expected functions that always give the same for the same document")


def _unstable(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Functions that may give another value for the same row; macros by what they are made of."""
    rows = connection.execute(
        "SELECT lower(function_name), coalesce(stability, '') IN ('', 'CONSISTENT'), "
        "lower(coalesce(macro_definition, '')) FROM duckdb_functions()"
    ).fetchall()
    found = {name for name, consistent, _ in rows if not consistent} | _TELLING | _OF_NOW
    while True:
        more = {
            name for name, _, text in rows if any(w in found or w.startswith("current_") for w in _WORD.findall(text))
        }
        if more <= found:
            return found
        found |= more


def _parse(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    """The syntax tree of one query."""
    import duckdb

    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise InputError(f"sql: {first_line(error)}") from None
    if len(statements) != 1:
        raise InputError(f"sql: expected one query, got {len(statements)} statements")
    ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    try:
        tree: dict[str, Any] = json.loads(text)
    except RecursionError:
        raise InputError("sql: expected a query that is nested less deeply") from None
    if tree["error"]:
        name = statements[0].type.name
        got = "a PIVOT that lists no values (IN (…))" if name in ("MULTI", "SELECT") else name
        raise InputError(f"sql: expected SELECT, SHOW, DESCRIBE or SUMMARIZE over the views, got {got}")
    return tree


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in a tree; no recursion: a hostile query may be nested deeply."""
    stack = [value]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            yield found
            stack.extend(found.values())
        elif isinstance(found, list):
            stack.extend(found)


def _views(tree: list[dict[str, Any]], views: set[str], internal: set[str]) -> frozenset[str]:
    """``internal`` are DuckDB's own views that need no schema: a name is theirs where a WITH of it is not seen."""
    named = {str(entry["key"]).lower() for node in tree for entry in (node.get("cte_map") or {}).get("map", ())}
    named -= internal
    read: set[str] = set()
    for node in tree:
        if str(node.get("function_name", "")).lower() in _TELLING:
            raise InputError(f"sql: {node['function_name']}(…): tells of this machine; expected a query over the views")
        kind = node.get("type")
        if "class" in node or not isinstance(kind, str):
            continue  # an expression, or a constant with its type
        if kind not in _NODES and not kind.endswith("_TYPE_INFO"):
            raise InputError(f"sql: {kind.removesuffix('_NODE').replace('_', ' ')}: expected a query that only reads")
        if kind == "TABLE_FUNCTION":
            name = str(node["function"]["function_name"]).lower()
            if name not in _FUNCTIONS:
                raise InputError(f"sql: {name}(…): expected a view ({', '.join(sorted(views))}); it reads nothing else")
        elif kind == "BASE_TABLE":
            name, schema = str(node["table_name"]).lower(), str(node["schema_name"]).lower()
            catalog = str(node.get("catalog_name") or "").lower()
            if (
                catalog not in ("", _DATABASE) or len((node.get("qualified_name") or {}).get("path", ())) > 3
            ):  # DuckDB joins the three, and opens what looks like a file
                raise InputError(f"sql: there is no database {node['catalog_name']!r}; expected {_DATABASE}, or none")
            if name in views and schema in ("", "main"):
                read.add(name)
            elif schema == _CATALOG and name in _CATALOG_TABLES:
                read |= views
            elif name in internal and not schema:
                raise InputError(f"sql: {name} is the name of a table of DuckDB's own; expected another name")
            elif schema or catalog or name not in named or set(name) & _OF_PATHS:
                raise InputError(f"sql: there is no view {node['table_name']!r}; expected {', '.join(sorted(views))}")
        elif kind == "SHOW_REF" and node["query"] is None:
            shown = str(node["table_name"]).lower()
            if shown not in (_LISTS if node["show_type"] == "SHOW_SPECIAL" else views):
                raise InputError(f"sql: SHOW {shown}: expected SHOW TABLES, or SHOW and the name of a view")
            read |= views
    return frozenset(read)
