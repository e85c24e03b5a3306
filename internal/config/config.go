// Package config turns the configuration files into one immutable Config, and names
// every error in them with its place.
//
// An error of syntax counts against its file, one of meaning against its table. Load gives
// a Config of what is left, beside the list of what is wrong, and leaves it to its caller
// whether that counts or an earlier configuration.
package config

import (
	"path"
	"reflect"
	"slices"
	"sort"
	"time"
)

// Config is the merged result of all files. It is not changed after Load, so
// it may be shared between goroutines.
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
func (k Kubelet) PluginsRegistry() string { return path.Join(k.RootDir, "plugins_registry") }

// EndpointLink is the path of the link that the kubelet is told in place of a driver's socket.
func (k Kubelet) EndpointLink(driver string) string {
	return path.Join(k.RootDir, "plugins/csi-registrar", driver+".sock")
}

// Announced is the path that the kubelet is told for a driver, and the target of the link if that
// is one, else empty.
func (k Kubelet) Announced(d Driver) (endpoint, linkTarget string) {
	if d.EndpointLink {
		return k.EndpointLink(d.Name), d.Endpoint
	}
	return d.Endpoint, ""
}

// Log is the table [log].
type Log struct {
	Level  string // debug, info, warn or error
	Format string // auto, journal, text or json
}

// WhenGone says what becomes of the registration of a driver that does not answer.
type WhenGone string

// What can become of it. Keep is the default: withdrawing blocks unmounting too.
const (
	Keep     WhenGone = "keep"
	Withdraw WhenGone = "withdraw"
)

// OwnerAny as a SocketOwner turns the checks of the driver's socket off.
const OwnerAny = "any"

// Driver is one table [driver."NAME"].
type Driver struct {
	Name              string // what GetPluginInfo must answer; passes status.CheckName
	Socket            string // where the driver listens; absolute, clean, at most 107 bytes
	Endpoint          string // the socket as the kubelet sees it; as Socket, never empty
	EndpointLink      bool   // the kubelet is told a link to Endpoint: see Kubelet.EndpointLink
	Enabled           bool
	Timeout           time.Duration // of GetPluginInfo and Probe; above 0
	SupportedVersions []string      // never empty, one of them 1.x
	WhenGone          WhenGone
	WithdrawAfter     time.Duration // with Withdraw: how long the driver may be gone; above 0
	SocketOwner       string        // a user's name, a uid in decimal digits, or OwnerAny

	// KeptFor says why the driver is in force although its table disappeared from the files
	// for longer than the grace period. It is no key of a file.
	KeptFor string
}

// Default is the configuration where there is no file: no drivers.
func Default() *Config {
	return &Config{
		Kubelet: Kubelet{RootDir: "/var/lib/kubelet"},
		Log:     Log{Level: "info", Format: "auto"},
	}
}

// DefaultDriver is a table in which only the name and the socket are given.
func DefaultDriver(name, socket string) Driver {
	return Driver{
		Name:              name,
		Socket:            socket,
		Endpoint:          socket,
		Enabled:           true,
		Timeout:           5 * time.Second,
		SupportedVersions: []string{"1.0.0"},
		WhenGone:          Keep,
		WithdrawAfter:     30 * time.Second,
		SocketOwner:       "root",
	}
}

// Equal reports whether both tables say the same.
func (d Driver) Equal(o Driver) bool {
	return reflect.DeepEqual(d, o)
}

// Equal reports whether both configurations say the same. Where the values came from does
// not count.
func (c *Config) Equal(o *Config) bool {
	return c.Kubelet == o.Kubelet && c.Log == o.Log &&
		slices.EqualFunc(c.Drivers, o.Drivers, Driver.Equal)
}

// sortByName does not use slices.SortFunc: of a struct of this size, that is 30 kB of the binary.
func sortByName(drivers []Driver) {
	sort.Slice(drivers, func(i, j int) bool { return drivers[i].Name < drivers[j].Name })
}

// Driver finds a driver by name.
func (c *Config) Driver(name string) (Driver, bool) {
	i := slices.IndexFunc(c.Drivers, func(d Driver) bool { return d.Name == name })
	if i < 0 {
		return Driver{}, false
	}
	return c.Drivers[i], true
}
