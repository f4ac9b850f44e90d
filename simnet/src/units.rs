//! Durations as text ("300ms", "1.5s"), so that a schedule can be printed, edited and parsed.
use node_core::time::{Duration, Instant};
use serde::{Deserialize, Deserializer, Serializer};

/// The shortest exact text of a duration.
pub fn text(time: Duration) -> String {
    let ns = time.as_nanos();
    for (unit, size) in UNITS {
        if ns.is_multiple_of(size) && ns >= size {
            return format!("{}{unit}", ns / size);
        }
    }
    if ns == 0 { "0s".into() } else { format!("{ns}ns") }
}

/// `1 thread`, `2 threads`.
pub fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Parses "250us", "300ms", "1.5s" or "2m".
pub fn parse(text: &str) -> Result<Duration, String> {
    let trimmed = text.trim();
    let wrong = || format!("expected a time such as \"300ms\", \"1.5s\" or \"2m\", found {text:?}");
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim();
    let size = if unit == "ns" { Some(1) } else { UNITS.iter().find(|(name, _)| *name == unit).map(|(_, size)| *size) };
    let size = size.ok_or_else(wrong)?;
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let ns = number * size as f64;
    if !(0.0..=MOST_NS).contains(&ns) {
        return Err(wrong());
    }
    Ok(Duration::from_nanos(ns.round() as u64))
}

/// Serialises a `Duration` field.
pub(crate) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&text(*time))
}

/// Deserialises a `Duration` field.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    parse(&text).map_err(serde::de::Error::custom)
}

/// The same for instants: the time since the start of the world.
pub(crate) mod moment {
    use super::{Deserializer, Duration, Instant, Serializer};

    pub(crate) fn serialize<S: Serializer>(at: &Instant, to: S) -> Result<S::Ok, S::Error> {
        super::serialize(&Duration::from_nanos(at.0), to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Instant, D::Error> {
        super::deserialize(from).map(|time| Instant(0) + time)
    }
}

/// The same for optional durations.
pub(crate) mod optional {
    use super::{Deserialize, Deserializer, Duration, Serializer};

    pub(crate) fn serialize<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => to.serialize_some(&super::text(*time)),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| super::parse(&text)).transpose().map_err(serde::de::Error::custom)
    }
}

/// Largest first.
const UNITS: [(&str, u128); 4] = [("m", 60_000_000_000), ("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)];
/// Upper bound: a year.
const MOST_NS: f64 = 366.0 * 86_400.0 * 1e9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_round_trip_through_text() {
        for ns in [0, 1, 1_500, 2_000_000, 1_500_000_000, 3_000_000_000, 120_000_000_000] {
            let time = Duration::from_nanos(ns);
            assert_eq!(parse(&text(time)), Ok(time), "{}", text(time));
        }
        assert_eq!(parse("1.5s"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "5", "s", "-1s", "1.2.3s", "5 parsecs", "1e99s"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
