//! Formats Unix seconds as dates.

/// `2026-03-01 08:05 UTC`; after the year 9999 the number of seconds.
pub(crate) fn date_time(unix_seconds: u64) -> String {
    let date =
        i64::try_from(unix_seconds).ok().and_then(|seconds| time::OffsetDateTime::from_unix_timestamp(seconds).ok());
    let Some(date) = date else { return format!("{unix_seconds} s after 1970 UTC") };
    let (month, day) = (u8::from(date.month()), date.day());
    format!("{}-{month:02}-{day:02} {:02}:{:02} UTC", date.year(), date.hour(), date.minute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        assert_eq!(date_time(0), "1970-01-01 00:00 UTC");
        assert_eq!(date_time(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(date_time(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date_time(1_767_225_599), "2025-12-31 23:59 UTC");
        assert_eq!(date_time(u64::MAX), "18446744073709551615 s after 1970 UTC", "as a certificate may claim");
    }
}
