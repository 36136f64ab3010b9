// Files of a chart: CSV, SVG, and a PNG of the SVG.

import { duration, number } from './shared.js';

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [640, 400, 64, 56, 34];

/// Offers a file for saving.
export function save(name, type, content) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = document.createElement('a');
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/// Formats rows as CSV (RFC 4180). A text that a spreadsheet would compute gets a quote before it.
export function csv(rows) {
  const cell = (value) => {
    const text = typeof value === 'string' && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(cell).join(',')}\r\n`).join('');
}

const escaped = (text) => String(text).replace(/[&<>"']/g, (own) => `&#${own.charCodeAt(0)};`);

/// Returns about `count` round numbers between two values.
export function ticks(low, high, count, isLog = false) {
  if (isLog) {
    const out = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) if (10 ** power >= low && 10 ** power <= high) out.push(10 ** power);
    if (out.length > 1) return out;
  }
  const rough = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((own) => own * size >= rough);
  const out = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-12); at += 1) out.push(Number((at * step).toPrecision(12)));
  return out;
}

/// Draws a chart as SVG: what its range shows, with title, axes and legend.
export function svg({ title, x, range, y, log, time, lines, bands, ink, grid, paper }) {
  const place = (value, [from, to], begin, end, isLog) => {
    const of = isLog ? Math.log10 : (own) => own;
    return begin + ((of(value) - of(from)) / (of(to) - of(from) || 1)) * (end - begin);
  };
  const px = (value) => place(value, range, LEFT, WIDTH - 12, false).toFixed(2);
  const py = (value) => place(value, y, HEIGHT - BOTTOM, TOP, log).toFixed(2);
  const points = (values) => x.flatMap((own, at) => (own >= range[0] && own <= range[1] && Number.isFinite(values[at]) ? [[px(own), py(values[at])]] : []));
  const path = (values) => points(values).map(([a, b], at) => `${at ? 'L' : 'M'}${a} ${b}`).join('');
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${HEIGHT}" viewBox="0 0 ${WIDTH} ${HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="${ink}">`,
    `<rect width="${WIDTH}" height="${HEIGHT}" fill="${paper}"/>`,
    `<text x="${LEFT}" y="20" font-size="15" font-weight="600">${escaped(title)}</text>`,
    `<clipPath id="c"><rect x="${LEFT}" y="${TOP}" width="${WIDTH - 12 - LEFT}" height="${HEIGHT - BOTTOM - TOP}"/></clipPath>`,
  ];
  for (const own of ticks(...y, 5, log)) parts.push(`<path d="M${LEFT} ${py(own)}H${WIDTH - 12}" stroke="${grid}"/><text x="${LEFT - 6}" y="${Number(py(own)) + 4}" text-anchor="end">${number(own)}</text>`);
  for (const own of ticks(...range, 7)) parts.push(`<path d="M${px(own)} ${HEIGHT - BOTTOM}v4" stroke="${ink}"/><text x="${px(own)}" y="${HEIGHT - BOTTOM + 18}" text-anchor="middle">${time ? duration(own) : own}</text>`);
  parts.push('<g clip-path="url(#c)" fill="none">');
  for (const { colour, low, high } of bands) {
    const outline = [...points(high), ...points(low).reverse()].map((own, at) => `${at ? 'L' : 'M'}${own.join(' ')}`).join('');
    if (outline) parts.push(`<path d="${outline}Z" fill="${colour}" fill-opacity="0.15"/>`);
  }
  for (const { colour, values } of lines) parts.push(`<path d="${path(values)}" stroke="${colour}" stroke-width="1.75" stroke-linejoin="round"/>`);
  parts.push('</g>');
  let at = LEFT;
  for (const { label, colour } of lines.slice(0, 6)) {
    parts.push(`<path d="M${at} 38h16" stroke="${colour}" stroke-width="3"/><text x="${at + 20}" y="42">${escaped(label)}</text>`);
    at += 34 + 7 * label.length;
  }
  return `${parts.join('')}</svg>\n`;
}

/// Renders an SVG as a PNG of twice its size.
export async function picture(text) {
  const url = URL.createObjectURL(new Blob([text], { type: 'image/svg+xml' }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = document.createElement('canvas');
    Object.assign(canvas, { width: 2 * WIDTH, height: 2 * HEIGHT });
    canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => { canvas.toBlob(done, 'image/png'); });
  } finally {
    URL.revokeObjectURL(url);
  }
}
