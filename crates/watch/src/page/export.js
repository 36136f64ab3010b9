// Files of a chart: CSV, SVG, and a PNG of the SVG.

import { duration, number } from './shared.js';

const [WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, ROW] = [640, 400, 64, 12, 34, 18];
// Largest numbers of characters of a file's name and of an entry of the legend.
const [LONGEST_NAME, LONGEST_LABEL] = [100, 60];

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

/// Returns the name of a chart's file, without its ending.
export const fileName = (title) => title.replace(/[^\w.-]+/g, '-').toLowerCase().slice(0, LONGEST_NAME);

/// Returns about `count` round numbers between two values, which differ.
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

/// Places the entries of a legend in rows.
function legend(labels) {
  let [x, row] = [LEFT, 0];
  return labels.map((label) => {
    const width = 34 + 7 * [...label].length;
    if (x > LEFT && x + width > WIDTH - RIGHT) [x, row] = [LEFT, row + 1];
    x += width;
    return [x - width, 38 + ROW * row, label];
  });
}

/// Draws a chart as SVG: what its range shows, with title, axes and legend. `crates/watch/src/plot.rs` draws the same in files
/// that need no browser, and `tools/watch/check.mjs` compares them.
export function svg({ title, x, range, y, log, time, dots, lines, areas, ink, grid, paper }) {
  const named = lines.filter((own) => own.label !== undefined);
  const entries = legend(named.map(({ label }) => [...label].slice(0, LONGEST_LABEL).join('')));
  const top = entries.at(-1)[1] + ROW;
  const place = (value, [from, to], begin, end, isLog) => {
    const of = isLog ? Math.log10 : (own) => own;
    return begin + ((of(value) - of(from)) / (of(to) - of(from) || 1)) * (end - begin);
  };
  const px = (value) => place(value, range, LEFT, WIDTH - RIGHT, false).toFixed(2);
  const py = (value) => place(value, y, HEIGHT - BOTTOM, top, log).toFixed(2);
  const points = (values) => x.flatMap((own, at) => (own >= range[0] && own <= range[1] && Number.isFinite(values[at]) ? [[px(own), py(values[at])]] : []));
  const path = (all) => all.map(([a, b], at) => `${at ? 'L' : 'M'}${a} ${b}`).join('');
  const id = fileName(title);
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${HEIGHT}" viewBox="0 0 ${WIDTH} ${HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="${ink}">`,
    `<rect width="${WIDTH}" height="${HEIGHT}" fill="${paper}"/>`,
    `<text x="${LEFT}" y="20" font-size="15" font-weight="600">${escaped(title)}</text>`,
    `<clipPath id="${id}"><rect x="${LEFT}" y="${top}" width="${WIDTH - RIGHT - LEFT}" height="${HEIGHT - BOTTOM - top}"/></clipPath>`,
  ];
  for (const own of ticks(...y, 5, log)) parts.push(`<path d="M${LEFT} ${py(own)}H${WIDTH - RIGHT}" stroke="${grid}"/><text x="${LEFT - 6}" y="${py(own)}" dy="4" text-anchor="end">${number(own)}</text>`);
  for (const own of range[0] < range[1] ? ticks(...range, 7) : [range[0]]) parts.push(`<path d="M${px(own)} ${HEIGHT - BOTTOM}v4" stroke="${ink}"/><text x="${px(own)}" y="${HEIGHT - BOTTOM + 18}" text-anchor="middle">${time ? duration(own) : own}</text>`);
  parts.push(`<g clip-path="url(#${id})" fill="none" stroke-width="1.75" stroke-linejoin="round">`);
  for (const { colour, opacity, low, high } of areas) {
    const outline = path([...points(high), ...points(low).reverse()]);
    if (outline) parts.push(`<path d="${outline}Z" fill="${colour}" fill-opacity="${opacity}"/>`);
  }
  for (const { colour, label, values } of lines) {
    const all = points(values);
    parts.push(`<path d="${path(all)}" stroke="${colour}"${label === undefined ? ' stroke-opacity="0.33" stroke-width="1"' : ''}/>`);
    if (dots) for (const [a, b] of all) parts.push(`<circle cx="${a}" cy="${b}" r="2.5" fill="${colour}"/>`);
  }
  parts.push('</g>');
  entries.forEach(([left, middle, label], at) => parts.push(`<path d="M${left} ${middle}h16" stroke="${named[at].colour}" stroke-width="3"/><text x="${left + 20}" y="${middle}" dy="4">${escaped(label)}</text>`));
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
