//! Checks of a request's head: whom it is meant for, which page sends it, and whether the client knows a secret.
//!
//! Everything here is a function of bytes that a stranger chose. A value that is not exactly of the expected form is refused.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hyper::http::uri::Authority;

/// Returns true if an authority, `host` or `host:port`, names this machine in a way that no page can forge: as `localhost`, by a
/// loopback address, by the address `bound` of the server, or by one of its `names`. A server on all addresses accepts every address.
/// Names of users and ports without a number are refused.
pub fn names_machine(authority: &[u8], bound: IpAddr, names: &[String]) -> bool {
    let Ok(parsed) = Authority::try_from(authority) else { return false };
    let host = parsed.host();
    let rest = parsed.as_str().strip_prefix(host);
    let is_port = |port: &str| parsed.port().is_some() && port.bytes().all(|byte| byte.is_ascii_digit());
    if !rest.is_some_and(|rest| rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port)) {
        return false;
    }
    let address = match host.strip_prefix('[') {
        Some(inner) => {
            inner.strip_suffix(']').and_then(|inner| inner.parse::<Ipv6Addr>().ok()).map(IpAddr::V6)
        }
        None => host.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
    };
    host.eq_ignore_ascii_case("localhost")
        || names.iter().any(|name| host.eq_ignore_ascii_case(name))
        || address.is_some_and(|ip| ip.is_loopback() || ip == bound || bound.is_unspecified())
}

/// Origin of the page that sends a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// None: the client is no page, or a page that only reads.
    Absent,
    /// The server itself.
    Own,
    /// Another page, or a value that is no origin.
    Other,
}

/// Compares the values of `Origin` with the value of `Host`.
pub fn origin<'a>(host: &[u8], mut origins: impl Iterator<Item = &'a [u8]>) -> Origin {
    match (origins.next(), origins.next()) {
        (None, _) => Origin::Absent,
        (Some(origin), None) if origin.strip_prefix(b"http://") == Some(host) => Origin::Own,
        _ => Origin::Other,
    }
}

/// Returns true if the values of `Authorization` are one `Bearer` with this key.
pub fn is_bearer<'a>(mut values: impl Iterator<Item = &'a [u8]>, key: &str) -> bool {
    match (values.next().and_then(|value| value.strip_prefix(b"Bearer ")), values.next()) {
        (Some(given), None) => is_secret(given, key),
        _ => false,
    }
}

/// Returns true if a client knows a secret. The time does not depend on where the two differ. No one knows an empty secret.
pub fn is_secret(given: &[u8], secret: &str) -> bool {
    let secret = secret.as_bytes();
    let differ = given.iter().zip(secret).fold(0, |differ, (a, b)| std::hint::black_box(differ | (a ^ b)));
    !secret.is_empty() && given.len() == secret.len() && differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_machine(authority: &[u8], bound: IpAddr) -> bool {
        super::names_machine(authority, bound, &[])
    }

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn only_exact_names_of_this_machine_are_accepted() {
        for host in ["localhost", "LocalHost:1", "127.0.0.1", "127.9.9.9:65535", "[::1]", "[::1]:80"] {
            assert!(names_machine(host.as_bytes(), LOOPBACK), "{host}");
        }
        let refused = [
            "",
            ":",
            ":80",
            "@",
            "@localhost",
            "evil.example",
            "evil.example:80",
            "evil.example@127.0.0.1",
            "a:b@127.0.0.1",
            "evil.example@localhost:80",
            "127.0.0.1@evil.example",
            "127.0.0.1:80@evil.example",
            "localhost@localhost",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "localhost.",
            "127.0.0.1.",
            "127.1",
            "0x7f.0.0.1",
            "0177.0.0.1",
            "2130706433",
            "127.0.0.01",
            "8.8.8.8",
            "0.0.0.0",
            "10.0.0.1",
            "localhost:",
            "localhost:x",
            "localhost:-1",
            "localhost:+1",
            "localhost:65536",
            "localhost:80:80",
            "[127.0.0.1]",
            "::1",
            "[::1",
            "::1]",
            "[[::1]]",
            "[::1]80",
            "[::1]:",
            "[::1]:x",
            "[::1%25lo]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "localhost/",
            "localhost/x",
            "localhost?x",
            "localhost#x",
            "localhost\\",
            "local host",
            " localhost",
            "localhost ",
            "localhost,evil.example",
            "http://localhost",
            "l\u{f6}calhost",
            "localhost\0",
            "*",
        ];
        for host in refused {
            assert!(!names_machine(host.as_bytes(), LOOPBACK), "{host:?}");
        }
        assert!(!names_machine(b"localhost\xff", LOOPBACK));
        assert!(!names_machine(&[b'['; 5000], LOOPBACK));
    }

    #[test]
    fn the_address_of_the_server_is_its_name() {
        let own = IpAddr::from([192, 168, 1, 5]);
        assert!(names_machine(b"192.168.1.5:80", own) && !names_machine(b"192.168.1.6:80", own));
        let all = IpAddr::from([0, 0, 0, 0]);
        assert!(names_machine(b"10.1.2.3", all) && names_machine(b"[fe80::1]:1", all));
        assert!(!names_machine(b"evil.example", all) && !names_machine(b"x@10.1.2.3", all));
    }

    #[test]
    fn only_the_names_of_a_server_name_it() {
        let names = ["node7".to_owned(), "gpu.example.org".to_owned()];
        let named = |host: &str| super::names_machine(host.as_bytes(), LOOPBACK, &names);
        assert!(named("node7") && named("NODE7:8000") && named("gpu.example.org:1") && named("localhost"));
        for host in [
            "node8",
            "node7.example.org",
            "x.node7",
            "node7.",
            "node7@evil.example",
            "evil.example:node7",
            "node7:x",
        ] {
            assert!(!named(host), "{host}");
        }
    }

    #[test]
    fn an_origin_is_the_server_or_another_page() {
        let of = |origins: &[&[u8]]| origin(b"localhost:80", origins.iter().copied());
        assert_eq!(of(&[]), Origin::Absent);
        assert_eq!(of(&[b"http://localhost:80"]), Origin::Own);
        let others: [&[u8]; 9] = [
            b"",
            b"null",
            b"http://",
            b"http://localhost",
            b"http://localhost:8",
            b"http://localhost:800",
            b"https://localhost:80",
            b"http://evil.example",
            b"http://localhost:80\xff",
        ];
        for other in others {
            assert_eq!(of(&[other]), Origin::Other, "{other:?}");
        }
        assert_eq!(of(&[b"http://localhost:80", b"http://localhost:80"]), Origin::Other);
        assert_eq!(of(&[b"http://localhost:80", b"http://evil.example"]), Origin::Other);
    }

    #[test]
    fn a_key_is_known_or_not() {
        let knows = |values: &[&[u8]]| is_bearer(values.iter().copied(), "secret");
        assert!(knows(&[b"Bearer secret"]));
        let wrong: [&[u8]; 9] = [
            b"",
            b"Bearer",
            b"Bearer ",
            b"Bearer secre",
            b"Bearer secrets",
            b"Bearer Secret",
            b"secret",
            b"Basic secret",
            b"Bearer  secret",
        ];
        for value in wrong {
            assert!(!knows(&[value]), "{value:?}");
        }
        assert!(!knows(&[]) && !knows(&[b"Bearer secret", b"Bearer secret"]));
        assert!(!is_secret(b"", "") && !is_bearer([&b"Bearer "[..]].into_iter(), ""));
    }
}
