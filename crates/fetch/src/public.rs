//! Restriction to hosts of the public network.
//!
//! A row of a third-party dataset can name any address, including one that only this machine can reach: a local service, a
//! router, or the metadata of a cloud instance. The check is part of name resolution, so it also covers every redirect, and the
//! connection uses exactly the checked addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

use crate::FetchError;

#[derive(Debug, Default)]
pub(crate) struct PublicOnly {
    pub(crate) resolver: DefaultResolver,
    /// Local ports that tests may reach.
    #[cfg(test)]
    pub(crate) except: Vec<u16>,
}

impl Resolver for PublicOnly {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.resolver.resolve(uri, config, timeout)?;
        #[cfg(test)]
        if found.iter().all(|address| self.except.contains(&address.port())) {
            return Ok(found);
        }
        match found.iter().find(|address| !is_public(address.ip())) {
            None => Ok(found),
            Some(address) => Err(ureq::Error::Other(Box::new(FetchError::NotPublic {
                host: uri.host().unwrap_or_default().to_owned(),
                address: address.ip(),
            }))),
        }
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// Reports whether an IPv4 address is public, by the registry of special addresses (RFC 6890 and its successors).
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !(address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && (b == 18 || b == 19)))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let [.., high, low] = segments;
    let v4_inside = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match segments {
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => v4_inside(high, low),
        [0x2002, high, low, ..] => v4_inside(high, low),
        // Only this block is allocated; unique local, link local, loopback and multicast addresses are outside it.
        [first, second, ..] => {
            first & 0xe000 == 0x2000 && (first, second) != (0x2001, 0x0db8) && (first, second) != (0x2001, 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_and_its_network_are_told() {
        let not_public = [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "192.0.0.192",
            "198.18.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::a00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
        ];
        for address in not_public {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in
            ["1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:1.1.1.1"]
        {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }
}
