// Package config reads the configuration files into one immutable Config, and reports every error
// in them with its place.
//
// A file that cannot be parsed is left out, and so is the table of a driver that has an error.
// Load returns the valid part and the errors; its caller decides whether to use that or an earlier
// configuration.
package config

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"

	"csi-registrar/internal/node/rootdir"
)

// Config is the merged configuration of all files. It is not changed after Load, so it may be
// shared between goroutines.
type Config struct {
	Kubelet Kubelet
	Log     Log
	Drivers []Driver // sorted by name, no name twice
}

// Kubelet is the table [kubelet].
type Kubelet struct {
	RootDir string // absolute and clean
}

// PluginsRegistry is the directory in which the kubelet looks for registration sockets.
func (k Kubelet) PluginsRegistry() string { return rootdir.PluginsRegistry(k.RootDir) }

// Log is the table [log].
type Log struct {
	Level  string // debug, info, warn or error
	Format string // auto, journal, text or json
}

// Default returns the configuration without files: it has no drivers.
func Default() *Config {
	return &Config{Kubelet: defaults(kubeletFields()), Log: defaults(logFields())}
}

// DefaultDriver returns a table that has only a name and a socket.
func DefaultDriver(name, socket string) Driver {
	d := defaults(driverFields())
	d.Name, d.Socket, d.Endpoint = name, socket, socket
	return d
}

// UnmarshalJSON implements json.Unmarshaler: a key that an earlier version did not know has its
// default.
func (d *Driver) UnmarshalJSON(data []byte) error {
	type plain Driver
	with := plain(defaults(driverFields()))
	err := json.Unmarshal(data, &with)
	*d = Driver(with)
	return err
}

// Equal reports whether both tables have the same values.
func (d Driver) Equal(o Driver) bool {
	return reflect.DeepEqual(d, o)
}

// Equal reports whether both configurations have the same values, whatever their origin.
func (c *Config) Equal(o *Config) bool {
	return c.Kubelet == o.Kubelet && c.Log == o.Log &&
		slices.EqualFunc(c.Drivers, o.Drivers, Driver.Equal)
}

func sortByName(drivers []Driver) {
	slices.SortFunc(drivers, func(a, b Driver) int { return strings.Compare(a.Name, b.Name) })
}

// Driver finds a driver by name.
func (c *Config) Driver(name string) (Driver, bool) {
	i, ok := slices.BinarySearchFunc(c.Drivers, name, func(d Driver, name string) int { return strings.Compare(d.Name, name) })
	if !ok {
		return Driver{}, false
	}
	return c.Drivers[i], true
}
