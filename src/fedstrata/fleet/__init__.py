"""What devices do clients have: how large, how fast, and when are they there?

A fleet is text, as a method is: `devices` reads it, `quantities` its sizes and rates, `availability` when a device is
there. Nothing here trains: these are plain values and pure functions.
"""
