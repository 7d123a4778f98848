"""One server that the tests share, and its clients."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from served import Served, load, make_folder, serving_engine

import ortolan


@pytest.fixture(scope="session")
def model() -> ortolan.Model:
    return load(make_folder())


@pytest.fixture(scope="session")
def shared_server(model) -> Iterator[Served]:
    with serving_engine(model) as served:
        yield served


@pytest.fixture
def server(shared_server) -> Iterator[Served]:
    """The shared server; what a test asks of it leaves nothing behind."""
    yield shared_server
    shared_server.wait_until_idle()
    assert shared_server.problems == []


@pytest.fixture
def client(server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def shared_http(shared_server) -> Iterator[httpx.Client]:
    with shared_server.http() as http:
        yield http


@pytest.fixture
def http(server, shared_http) -> httpx.Client:
    return shared_http
