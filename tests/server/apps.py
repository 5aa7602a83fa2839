"""Requests to an app that stays, unlike that of `asking.ask`."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI


def asked(app: FastAPI, method: str, path: str, **given: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **given)

    return asyncio.run(send())
