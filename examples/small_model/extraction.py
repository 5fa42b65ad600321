"""A name, an age and a city out of a sentence, as JSON. Held-out rows share no name, city, sentence or order of keys with the others."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TRAINING_ROWS = 4000
HELD_OUT_ROWS = 200
AGES = range(18, 90)


@dataclass(frozen=True)
class Parts:
    "What sentences are made of."

    names: Sequence[str]
    cities: Sequence[str]
    sentences: Sequence[str]
    orders: Sequence[tuple[str, str, str]]  # of the keys


def words(text: str) -> list[str]:
    return text.split()


TRAINING = Parts(
    names=words(
        "Anna Ben Clara David Emma Felix Grace Henry Isla Jack Karen Liam Mary Noah Olivia Peter "
        "Quentin Rosa Sam Tina Ursula Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric "
        "Fiona George Hannah Ivan Julia Kevin Laura Martin Nina Oscar Paula Robert Sarah Thomas "
        "Una Vera Walter Alice Brian Aisha Bogdan Chiara Dmitri Esther Farid Giulia Hamza Imani "
        "Joaquin Katya Leandro Mireille Nadim Ottilie Pavel Ramona Sven Tamsin Ulrich Violeta "
        "Wojciech Ximena Yusuf Zainab Agnes Boris Camille Darius Eloise Fabio Gwen Hugo Irina "
        "Jasper Keiko Ludwig Marisol Nolan Orla Petra Rashid Simone Thora Umar Vikram Wanda "
        "Yelena Zoltan Astrid Benedikt Corinna Desmond Eugenie Florian Greta Hector Ines Jorge "
        "Kasper Lucinda Matteo Noor Oona Percy Rowan Selma Teodor Viola Wilfred Zelda "
        "Abel Adele Albert Alma Amelia Anton Arthur Audrey Barbara Bernard Bianca Bruno Cecilia Charles Clement "
        "Cosima Cyril Dana Dolores Dominic Dora Edgar Edith Edmund Elena Emil Erica Ernest Estelle Ethan Eva "
        "Flora Frank Frida Gabriel Gemma Gerald Gloria Gordon Harold Harriet Heidi Helen Herbert Holly Ian "
        "Ida Isaac Ivy Jacob Jane Jasmine Joan Joel Judith Kate Kenneth Kirsten Lars Leah Leo Lily Linus "
        "Louise Lucas Lydia Mabel Magnus Marcus Maria Max Melissa Milo Miriam Monica Nancy Naomi Nathan Nora "
        "Olga Oliver Otto Pamela Patrick Pauline Philip Phoebe Raymond Rebecca Ruben Ruth Samuel Silvia "
        "Sonia Stella Susan Tara Theresa Timothy Toby Ursel Vincent Virginia Walker Werner Yvonne"
    ),
    cities=words(
        "London Paris Berlin Madrid Rome Vienna Dublin Boston Chicago Denver Seattle Toronto "
        "Tokyo Sydney Cairo Athens Lisbon Prague Warsaw Helsinki Stockholm Oslo Moscow Istanbul "
        "Dallas Miami Atlanta Houston Phoenix Detroit Montreal Vancouver Beijing Seoul Bangkok "
        "Jakarta Delhi Lagos Nairobi Lima Aarhus Bilbao Cordoba Dresden Essen Fresno Ghent Havana "
        "Izmir Jaipur Krakow Lille Malmo Naples Odessa Porto Quebec Reno Seville Tallinn Utrecht "
        "Verona Windhoek Xian Yerevan Zurich Accra Basel Caracas Durban Exeter Fukuoka Graz Hanoi "
        "Ipswich Juneau Kigali Lusaka Maputo Nantes Oxford Perth Rabat Sofia Tunis Uppsala "
        "Vilnius Wichita York Antwerp Bristol Calgary Doha Eugene Florence Glasgow Hobart "
        "Innsbruck Jeddah Karachi Lahore Mumbai Norwich Oulu Palermo Rotterdam Salzburg Toledo "
        "Ulm Valencia Worcester "
        "Aberdeen Adelaide Albany Algiers Ankara Austin Baghdad Baltimore Bangalore Barcelona Bergen Bern "
        "Bologna Bordeaux Bremen Brisbane Brussels Buffalo Cambridge Canberra Cardiff Casablanca Charlotte "
        "Chester Cleveland Cologne Columbus Copenhagen Cork Damascus Darwin Derby Dortmund Dover Edinburgh "
        "Frankfurt Gdansk Genoa Gothenburg Granada Hanover Hartford Hiroshima Kabul Kingston Leipzig "
        "Liverpool Luxembourg Malaga Manchester Marseille Memphis Mexico Milan Minsk Monaco Nagoya Newcastle "
        "Nuremberg Orlando Ottawa Panama Pittsburgh Plymouth Richmond Rostock Santiago Shanghai Sheffield "
        "Singapore Stuttgart Tehran Trieste Tucson Valletta Venice Winnipeg Yokohama"
    ),
    sentences=(
        "{name} is {age} years old and lives in {city}.",
        "{name}, {age}, moved to {city} last year.",
        "My neighbour {name} comes from {city} and just turned {age}.",
        "At the age of {age}, {name} opened a bakery in {city}.",
        "In {city} there is a teacher called {name}, who is {age}.",
        "{name} was born in {city} {age} years ago.",
        "We met {name} in {city}, at a party for a birthday: {age}!",
        "The {age}-year-old {name} works at the port of {city}.",
        "From {city} we have a letter by {name}, aged {age}.",
        "The winner is {name} from {city}. At {age}, nobody was faster.",
        "Our guest tonight lives in {city}: please welcome {name}, {age} years young!",
        "It took {name} all of {age} years to see {city} for the first time.",
        "Age {age}, city {city}, name {name}: that is all the form says.",
        "{city}, says {name}, has not changed much in {age} years of life there.",
        "Who is {age}, sings well and lives in {city}? It is {name}.",
        "A ticket to {city} was sold to {name}, {age}.",
        "They call {name} the oldest student of {city}, and {age} is old for a student.",
        "Born {age} years ago, {name} has never left {city}.",
        "When {name} turned {age}, the whole of {city} danced.",
        "The police of {city} are looking for {name}, {age}, who lost a purse.",
        "{age} candles were on the cake that {city} baked for {name}.",
        "At {age}, {name} is the youngest mayor that {city} ever had.",
        "There is no better cook in {city} than {name}, who is {age}.",
        "{name} runs a small hotel in {city} and feels younger than {age}.",
        "What {city} will remember is how {name} sang at {age}.",
        "Flying back to {city} was a joy for {name}, who had just turned {age}.",
        "{city} chose {name}, {age}, as its first singing postman.",
        "As {name} has moved away, {city} misses a baker of {age}.",
        "{name}, a nurse of {age} by now, keeps a boat near {city}.",
        "For {age} years {city} has been all that {name} knows.",
        "Even in {city} few people are as tall at {age} as {name} is.",
        "The letter from {city} is signed: {name}, aged {age}.",
        "A painter of {age}, {name}, bought the oldest house of {city}.",
        "Before {name} came to {city}, no one there had run so fast at {age}.",
        "With {age} candles {city} surprised its gardener, {name}.",
        "{city} never saw a better swimmer than {name}, {age} years old.",
    ),
    orders=(
        ("name", "age", "city"),
        ("age", "name", "city"),
        ("city", "age", "name"),
        ("name", "city", "age"),
    ),
)
HELD_OUT = Parts(
    names=words(
        "Amir Beatrice Cedric Daphne Elias Freya Gustav Hilda Ingrid Jonas Kavya Lorenzo Maeve "
        "Nikolai Odette Priya Rafael Saskia Tobias Valentina"
    ),
    cities=words(
        "Budapest Geneva Hamburg Melbourne Portland Kyoto Manila Bogota Zagreb Nashville Lyon "
        "Munich Osaka Tampa Quito Dakar Riga Turin Omaha Leeds"
    ),
    sentences=(
        "Last summer {name} celebrated turning {age} with friends in {city}.",
        "A {age}-year-old resident of {city}, {name}, found the lost dog.",
        "{city} is home to {name}, who is {age} today.",
        "Nobody in {city} believed that {name} was already {age}.",
        "{name} has an office in {city} and is {age} years of age.",
        "Since {name} left for {city}, the family misses the {age}-year-old.",
    ),
    orders=(("age", "city", "name"), ("city", "name", "age")),
)


def make_rows(parts: Parts, count: int, seed: str) -> list[dict[str, str]]:
    "So many different rows."
    pick = random.Random(seed)
    rows_by_question: dict[str, dict[str, str]] = {}
    while len(rows_by_question) < count:
        person = {
            "name": pick.choice(parts.names),
            "age": pick.choice(AGES),
            "city": pick.choice(parts.cities),
        }
        first, second, third = order = pick.choice(parts.orders)
        sentence = pick.choice(parts.sentences).format(**person)
        question = f'Text: {sentence}\nJSON with the keys "{first}", "{second}" and "{third}":'
        answer = json.dumps({key: person[key] for key in order})
        rows_by_question[question] = {"question": question, "answer": answer}
    return list(rows_by_question.values())


def rows() -> list[dict[str, str]]:
    "Rows to train on, then the held-out ones."
    return make_rows(TRAINING, TRAINING_ROWS, "training") + make_rows(
        HELD_OUT, HELD_OUT_ROWS, "held out"
    )


def as_object(text: str) -> dict[str, Any]:
    "The JSON object that the text is, without spaces around its texts; empty where it is none."
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: item.strip() if isinstance(item, str) else item for key, item in value.items()}


def exact(text: str, answer: str) -> float:
    "1 if the completion is the right JSON object, keys in the order that was asked for, and nothing else."
    return float(list(as_object(text).items()) == list(json.loads(answer).items()))


def fields(text: str, answer: str) -> float:
    "The share of keys with the right value in the first object of the text, halved where their order is another one."
    wanted = json.loads(answer)
    found = re.search(r"\{.*?\}", text, re.DOTALL)
    values = as_object(found[0]) if found else {}
    share = sum(values.get(key) == value for key, value in wanted.items()) / len(wanted)
    return share if list(values) == list(wanted) else share / 2
