"""Everyday kinds of tool, each under many names and schemas: weather, mail, calendar, lights, orders ...

Owns the kinds that need no world knowledge. Invariant: each request can be answered by exactly one call.
"""

from demo.chats.dice import Dice
from demo.chats.packing import pack, param
from demo.chats.tasks import Param, Task, listing, lower_first, quoted, upper_first

_SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy", "stormy"]
_UNITS = [
    ("km", "miles"),
    ("kg", "pounds"),
    ("USD", "EUR"),
    ("EUR", "JPY"),
    ("celsius", "fahrenheit"),
    ("meters", "feet"),
    ("liters", "gallons"),
    ("GBP", "USD"),
    ("hours", "minutes"),
    ("inches", "cm"),
]
_RECORDS = [
    "order",
    "user",
    "customer",
    "ticket",
    "invoice",
    "product",
    "account",
    "package",
    "booking",
    "device",
]


def weather(d: Dice) -> Task:
    c, t, sky = d.place(), d.whole(-10, 38), d.pick(_SKIES)
    unit = d.pick(["celsius", "fahrenheit"]) if d.chance(0.3) else None
    pairs = [
        (
            param(
                d,
                "city/location/place/town/city/location/q",
                "string",
                d.pick(["The city name", "Name of the city", "The place to look up"]),
            ),
            c,
        )
    ]
    if unit or d.chance(0.3):
        pairs.append(
            (param(d, "unit/units", "string", "Temperature unit", False, ("celsius", "fahrenheit")), unit)
        )
    u = f" in {unit}" if unit else ""
    queries = [
        f"What is the weather in {c}{u}?",
        f"What's the weather like in {c}{u}?",
        f"How is the weather in {c} today{u}?",
        f"Weather in {c}{u}",
        f"weather {c}{u}",
        f"Tell me the weather for {c}{u}.",
        f"What is the temperature in {c}{u}?",
        f"I am travelling to {c}. What is the weather there{u}?",
        f"Is it warm in {c}{u}?",
        f"Check the weather in {c}{u} please.",
    ]
    response = d.pick(
        [
            {"temperature": t, "condition": sky},
            {"city": c, "temp": t, "sky": sky},
            {"temperature": t, "unit": unit or "celsius", "description": sky},
            f"{sky}, {t} degrees",
            {"temp_c": t, "conditions": sky, "humidity": d.whole(20, 99)},
        ]
    )
    answers = [
        f"It is {t} degrees and {sky} in {c}.",
        f"The weather in {c} is {sky} with {t} degrees.",
        f"In {c} it is {sky}, {t} degrees.",
    ]
    names = "get weather/get current weather/weather/fetch weather/check weather/weather lookup/get forecast"
    return pack(
        d,
        names,
        ["Get the weather for a city", "Get the current weather in a place", "Look up the weather"],
        pairs,
        queries,
        response,
        answers,
        f"know the weather in {c}",
    )


def clock(d: Dice) -> Task:
    c, h = d.place(), f"{d.whole(0, 23):02d}:{d.whole(0, 59):02d}"
    return pack(
        d,
        "get time/current time/time now/get current time/clock/world clock",
        ["Get the current time in a city", "Get the time for a timezone"],
        [(param(d, "city/timezone/location/place/tz", "string", "City or timezone"), c)],
        [
            f"What time is it in {c}?",
            f"Tell me the time in {c}.",
            f"time in {c}",
            f"What's the current time in {c}?",
        ],
        d.pick([h, {"time": h}, {"timezone": c, "time": h}]),
        [f"It is {h} in {c}.", f"The time in {c} is {h}."],
        f"know the time in {c}",
    )


def price(d: Dice) -> Task:
    s = d.made_up().upper()[: d.whole(3, 5)] if d.chance(0.6) else d.pick(d.words["proper"])
    v = d.decimal()
    return pack(
        d,
        "get stock price/stock price/get price/get quote/lookup price",
        ["Get the price of a stock", "Get the latest price"],
        [(param(d, "symbol/ticker/stock/name", "string", "Ticker symbol"), s)],
        [
            f"What is the price of {s}?",
            f"Stock price of {s}",
            f"How much is {s} worth?",
            f"Get me a quote for {s}.",
        ],
        d.pick([{"price": v}, str(v), {"symbol": s, "price": v, "currency": "USD"}]),
        [f"The price of {s} is {v}.", f"{s} is at {v}."],
        f"get the price of {s}",
    )


def event(d: Dice) -> Task:
    t, day, h = d.phrase(1, 4), d.date(), d.time() if d.chance(0.7) else None
    at, q = f" at {h}" if h else "", quoted(d, t)
    return pack(
        d,
        "create event/add event/schedule meeting/add to calendar/calendar add/create meeting",
        ["Create a calendar event", "Add an event to the calendar"],
        [
            (param(d, "title/name/summary/event", "string", "Title of the event"), t),
            (param(d, "date/day/start_date", "string", "Date"), day),
            (param(d, "time/start_time/hour", "string", "Time", False), h),
        ],
        [
            f"Schedule {q} on {day}{at}.",
            f"Add an event called {q} on {day}{at}",
            f"Put {q} in my calendar for {day}{at}.",
            f"Create a meeting {q} on {day}{at}",
        ],
        d.pick([{"id": d.ident(), "status": "created"}, "ok", {"status": "confirmed"}]),
        [f"The event {t} is set for {day}{at}.", f"Done. I added {t} on {day}{at}."],
        f"add {t} on {day}{at}",
    )


def mail(d: Dice) -> Task:
    to, s, b = d.email() if d.chance(0.8) else d.person(), d.phrase(1, 5), d.sentence()
    pairs = [
        (param(d, "to/recipient/email/address", "string", "Recipient"), to),
        (param(d, "subject/title", "string", "Subject line"), s),
        (param(d, "body/message/text/content", "string", "The message"), b),
    ]
    return pack(
        d,
        "send email/email/send mail/compose email/mail",
        ["Send an email", "Send an e-mail message"],
        pairs,
        [
            f'Send an email to {to} with subject {quoted(d, s)} and body "{b}".',
            f"Email {to}. Subject: {s}. Body: {b}",
            f'Write to {to} about {quoted(d, s)}: "{b}"',
            f'Mail {to}, subject {quoted(d, s)}, saying "{b}"',
        ],
        d.pick([{"status": "sent"}, "sent", {"id": d.ident(), "sent": True}]),
        [f"The email to {to} was sent.", f"Done, I sent the email to {to}."],
        f"email {to}",
    )


def message(d: Dice) -> Task:
    to, b = d.person() if d.chance(0.6) else "#" + d.word(), d.sentence()
    return pack(
        d,
        "send message/post message/send sms/notify/text/slack post",
        ["Send a message", "Post a message to a channel or person"],
        [
            (param(d, "to/channel/recipient/user/name", "string", "Who gets it"), to),
            (param(d, "text/message/body/content", "string", "The message"), b),
        ],
        [
            f"Tell {to}: {b}",
            f'Send "{b}" to {to}.',
            f'Message {to} "{b}"',
            f'Post "{b}" to {to}',
            f'Text {to} "{b}"',
        ],
        d.pick(["ok", {"status": "delivered"}, {"ok": True}]),
        [f"I told {to}.", f"The message to {to} was sent."],
        f"message {to}",
    )


def remind(d: Dice) -> Task:
    t, w = d.phrase(2, 4), d.pick([d.time(), d.date(), f"{d.whole(2, 90)} minutes"])
    pre = "in" if "minutes" in w else "at" if ":" in w or w.endswith("m") else "on"
    return pack(
        d,
        "set reminder/create reminder/add reminder/remind me/reminder",
        ["Set a reminder", "Create a reminder at a given time"],
        [
            (param(d, "text/task/message/what", "string", "What to remember"), t),
            (param(d, "time/when/at", "string", "When"), w),
        ],
        [
            f"Remind me {pre} {w}: {t}",
            f"Set a reminder for {quoted(d, t)} {pre} {w}.",
            f"Remind me about {quoted(d, t)} {pre} {w}",
        ],
        d.pick(["ok", {"status": "set"}]),
        [f"I will remind you {pre} {w}: {t}.", f"The reminder for {t} is set."],
        f"set a reminder for {t}",
    )


def convert(d: Dice) -> Task:
    u = d.pick(_UNITS)[:: d.pick([1, -1])]
    v, o = d.number(), d.decimal()
    pairs = [
        (param(d, "value/amount/quantity/number", "number", "Amount"), v),
        (param(d, "from/from_unit/source/from_currency", "string", "Unit to convert from"), u[0]),
        (param(d, "to/to_unit/target/to_currency", "string", "Unit to convert to"), u[1]),
    ]
    return pack(
        d,
        "convert units/convert/unit convert/convert currency/exchange",
        ["Convert a value from one unit to another", "Unit and currency conversion"],
        pairs,
        [
            f"Convert {v} {u[0]} to {u[1]}.",
            f"How much is {v} {u[0]} in {u[1]}?",
            f"What is {v} {u[0]} in {u[1]}?",
            f"{v} {u[0]} to {u[1]}",
        ],
        d.pick([{"result": o}, str(o), {"value": o, "unit": u[1]}]),
        [f"{v} {u[0]} is {o} {u[1]}.", f"That is {o} {u[1]}."],
        f"convert {v} {u[0]} to {u[1]}",
    )


def light(d: Dice) -> Task:
    room, on = (
        d.pick(["kitchen", "bedroom", "office", "hall", "garage", "garden", "bathroom", d.word()]),
        d.pick(["on", "off"]),
    )
    level = d.whole(1, 100) if on == "on" and d.chance(0.4) else None
    pairs = [
        (param(d, "room/device/name/location/light", "string", "Which light"), room),
        (param(d, "state/action/power", "string", "on or off", True, ("on", "off")), on),
        (param(d, "brightness/level", "integer", "Brightness in percent", False), level),
    ]
    return pack(
        d,
        "set light/control light/light switch/switch device/toggle light",
        ["Turn a light on or off", "Control the lights"],
        pairs,
        [
            f"Turn {on} the {room} light" + (f" at {level} percent." if level else "."),
            f"Switch the {room} light {on}" + (f" with brightness {level}" if level else ""),
            f"Lights {on} in the {room}" + (f", {level}%" if level else "") + ".",
        ],
        d.pick(["ok", {"status": "ok", "state": on}]),
        [f"The {room} light is {on}.", f"Done, the light in the {room} is {on}."],
        f"turn {on} the {room} light",
    )


def record(d: Dice) -> Task:
    n, i = d.pick(_RECORDS), d.ident()
    f = {
        d.pick(["status", "state"]): d.pick(["open", "shipped", "closed", "active", "paid", "late"]),
        d.pick(["owner", "name", "customer"]): d.person(),
        d.pick(["total", "amount", "count"]): d.number(),
    }
    f = dict(list(f.items())[: d.whole(1, 3)])
    return pack(
        d,
        f"get {n}/fetch {n}/lookup {n}/get {n} status/{n} info",
        [f"Get the details of one {n}", f"Look up the {n} by id", f"Fetch {n} data"],
        [(param(d, f"{n}_id/id/{n}_number/identifier", "string", f"The id of the {n}"), i)],
        [
            f"What is the status of {n} {i}?",
            f"Look up {n} {i}.",
            f"Get {n} {i}",
            f"Show me {n} {i}",
            f"Tell me about {n} number {i}.",
            f"Where is {n} {i}?",
        ],
        f,
        [
            f"{upper_first(n)} {i}: " + ", ".join(f"{k} {v}" for k, v in f.items()) + ".",
            f"For {n} {i} the " + " and the ".join(f"{k} is {v}" for k, v in f.items()) + ".",
        ],
        f"look up {n} {i}",
    )


def todo(d: Dice) -> Task:
    t = d.phrase(2, 5)
    q, urgent = quoted(d, t), d.pick([None, None, "low", "medium", "high"])
    tail = f" with {urgent} priority" if urgent else ""
    return pack(
        d,
        "add todo/create task/add task/new todo/add item",
        ["Add a task to the list", "Create a to-do item"],
        [
            (param(d, "task/title/text/item", "string", "The task"), t),
            (param(d, "priority", "string", "Priority", False, ("low", "medium", "high")), urgent),
        ],
        [f"Add {q} to my list{tail}.", f"Put {q} on my todo list{tail}", f"Create a task {q}{tail}."],
        d.pick(["ok", {"id": d.whole(1, 99)}]),
        [f"I added {t} to your list.", f"The task {t} was created."],
        f"add the task {t}",
    )


def page(d: Dice) -> Task:
    u, s = d.url(), d.sentence()
    return pack(
        d,
        "fetch url/http get/open page/download page/fetch/browse",
        ["Fetch a web page", "Get the text of a URL"],
        [(param(d, "url/link/address", "string", "The URL"), u)],
        [f"Open {u}", f"Fetch {u} for me.", f"What does {u} say?", f"Get the page {u}", f"Summarize {u}"],
        s if d.chance(0.6) else {"status": 200, "text": s},
        [f"The page says: {s}", f"It says: {s}"],
        f"fetch {u}",
    )


def music(d: Dice) -> Task:
    a = d.person() if d.chance(0.5) else d.phrase(1, 4)
    q = quoted(d, a)
    return pack(
        d,
        "play music/play/play song/start playback",
        ["Play music", "Play a song or an artist"],
        [(param(d, "song/query/artist/title/name", "string", "What to play"), a)],
        [f"Play {q}", f"Play something by {q}.", f"I want to hear {q}", f"Put on {q}."],
        d.pick(["playing", {"status": "playing"}]),
        [f"Now playing {a}.", f"Playing {a}."],
        f"play {a}",
    )


def search(d: Dice) -> Task:
    word, _, gloss = d.definition()[:3]
    q = word if d.chance(0.5) else d.phrase(2, 5)
    limit = d.whole(1, 10) if d.chance(0.25) else None
    pairs = [
        (
            param(
                d,
                "query/q/query/keywords/search_term/text",
                "string",
                d.pick(["The search query", "What to search for", "Query"]),
            ),
            q,
        )
    ]
    if limit or d.chance(0.25):
        pairs.append(
            (param(d, "limit/max_results/top_k/count", "integer", "Number of results", False), limit)
        )
    hit, tail = {"title": word, "snippet": gloss}, f" Show {limit} results." if limit else ""
    t = quoted(d, q)
    return pack(
        d,
        "search/web search/search web/search docs/find documents/lookup topic/internet search",
        ["Search the web", "Search documents for a query", "Find pages about a topic"],
        pairs,
        [
            f"Search for {t}.{tail}",
            f"Search the web for {t}.{tail}",
            f"Find information about {t}.{tail}",
            f"Look up {t} online.{tail}",
            f"What can you find about {t}?{tail}",
        ],
        d.pick([[hit], {"results": [hit]}, f"{word}: {gloss}"]),
        [
            f"I found this: {word}: {gloss}.",
            f"According to the search, {word} is: {gloss}.",
            f"The top result is {word}: {gloss}.",
        ],
        f"search for {q}",
    )


def no_argument(d: Dice) -> Task:
    n, q, v, a = d.pick(
        [
            ("get date", "What is the date today?", d.date(), "Today is {}."),
            ("get location", "Where am I?", d.place(), "You are in {}."),
            ("get battery", "How full is the battery?", f"{d.whole(1, 100)}%", "The battery is at {}."),
            (
                "list users",
                "Who are the users?",
                ", ".join(d.person() for _ in range(3)),
                "The users are {}.",
            ),
            (
                "get ip",
                "What is my IP address?",
                ".".join(str(d.whole(1, 254)) for _ in range(4)),
                "Your IP address is {}.",
            ),
            ("random number", "Give me a random number.", str(d.whole(1, 1000)), "Your number is {}."),
        ]
    )
    return pack(
        d,
        n,
        [upper_first(n), f"{upper_first(n)} now"],
        [],
        [q, lower_first(q)],
        v,
        [a.format(v)],
        lower_first(n),
    )


def order_items(d: Dice) -> Task:
    """A shop order: an array of objects and an address object, as real shop tools have."""
    items = [{"name": d.word(), "quantity": d.whole(1, 20)} for _ in range(d.whole(1, 3))]
    listed = listing([f"{i['quantity']} {i['name']}" for i in items])
    fields = (Param("name", "string"), Param("quantity", "integer"))
    pairs: list = [
        (Param(d.pick(["items", "products", "lines"]), "objects", "What to order", True, (), fields), items)
    ]
    where = ""
    if d.chance(0.5):
        home = {"street": f"{d.whole(1, 99)} {d.pick(d.words['proper'])} Street", "city": d.place()}
        pairs.append(
            (Param("address", "object", "Where to send it", True, (), (Param("street"), Param("city"))), home)
        )
        where = f" to {home['street']}, {home['city']}"
    i = d.ident()
    return pack(
        d,
        "create order/place order/order items/checkout",
        ["Order items from the shop", "Place an order"],
        pairs,
        [
            f"Order {listed}{where}.",
            f"Please order {listed}{where}",
            f"I need {listed}, delivered{where}." if where else f"I need {listed}.",
        ],
        d.pick([{"order_id": i}, {"id": i, "status": "placed"}, f"order {i} placed"]),
        [f"Your order {i} is placed.", f"Done. The order number is {i}."],
        f"order {listed}",
    )


DAILY = {
    weather: 2.2,
    clock: 0.8,
    price: 0.5,
    event: 0.8,
    mail: 1.0,
    message: 0.7,
    remind: 0.6,
    convert: 0.8,
    light: 0.6,
    record: 1.0,
    todo: 0.5,
    page: 0.6,
    music: 0.4,
    search: 1.2,
    no_argument: 0.4,
    order_items: 0.8,
}
